"""Faults that the tests must notice: `python -m tests.mutate` puts each into a copy of the code and runs the tests."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "tests/kvcompress/"
INVARIANTS = CORE + "test_invariants.py"


AUTHORS = "tests/oracle/authors/test_authors.py::"
AUTHORS += "test_ours_keeps_what_the_authors_code_keeps_but_for_named_differences"


def recorded(*cases: str) -> tuple[str, ...]:
    """The tests of these recordings of the authors' code: `<fixture> <label>`."""
    return tuple(f"{AUTHORS}[{case}]" for case in cases)


@dataclass(frozen=True)
class Mutation:
    """One line of the code, broken.

    Attributes:
        file: below `kvcompress/`, or below the repository, in `lmms_eval_plugins/`.
        old, new: a snippet that stands in the file once, and what takes its place.
        breaks: what goes wrong, in a few words.
        tests: the files, or tests of them, that should notice.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """Below the repository."""
        return self.file if self.file.startswith("lmms_eval_plugins/") else f"kvcompress/{self.file}"

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]


MUTATIONS = {
    # -- scoring
    "window-causal": Mutation(
        "scoring/windows.py",
        "dtype=torch.bool, device=keys.device).triu(1)",
        "dtype=torch.bool, device=keys.device).triu(2)",
        "a query of the observation window sees the token behind it",
        (CORE + "clusters/test_clusters.py",),
    ),
    "recent-off-by-one": Mutation(
        "scoring/windows.py",
        "protected[..., max(scores.shape[-1] - int(recent[0]), 0) :]",
        "protected[..., max(scores.shape[-1] - int(recent[0]) + 1, 0) :]",
        "one recent token fewer is protected",
        (CORE + "clusters/test_clusters.py",),
    ),
    "pads-attended": Mutation(
        "scoring/windows.py",
        'logits.masked_fill_(pad_columns(padding, columns)[:, :, None, None, :], float("-inf"))',
        "logits.masked_fill_(pad_columns(padding, columns)[:, :, None, None, :], 0.0)",
        "pads count as tokens: they take their part of the attention",
        (CORE + "scoring/test_windows.py", CORE + "clusters/test_clusters.py"),
    ),
    "groups-mixed": Mutation(
        "scoring/windows.py",
        "recent = queries[:, :, -window:].float().reshape(",
        "recent = queries[:, :, -window:].float().unflatten(1, (groups, kv_heads)).transpose(1, 2).reshape(",
        "query heads are grouped onto the wrong KV head",
        (CORE + "clusters/test_clusters.py",),
    ),
    "budget-rounded-down": Mutation(
        "scoring/budget.py",
        "math.floor(self.ratio * (length - on_top) + 0.5)",
        "math.floor(self.ratio * (length - on_top))",
        "a ratio's entries are rounded down, not half up",
        (CORE + "scoring/test_budget.py",),
    ),
    "remainder-lost": Mutation(
        "scoring/budget.py",
        "over = sum(parts) - total",
        "over = 0",
        "the layers' budgets do not sum to the total",
        (CORE + "scoring/test_budget.py",),
    ),
    "ties-to-the-oldest": Mutation(
        "scoring/selection.py",
        "kept = columns - 1 - order",
        "kept = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]",
        "among equal scores the oldest wins, not the most recent",
        (CORE + "clusters/test_clusters.py", CORE + "scoring/test_windows.py"),
    ),
    "safeguard-ignored": Mutation(
        "scoring/selection.py",
        "quota = (1 - safeguard) * highest.double() + safeguard * rest / scores.shape[1]",
        "quota = highest.double()",
        "no head is sure of its part under AdaKV",
        (CORE + "clusters/test_clusters.py",),
    ),
    "merge-weight": Mutation(
        "scoring/merging.py",
        "return evicted, (similarity - 1).exp()",
        "return evicted, similarity.exp()",
        "D2O: an evicted entry weighs more than the kept one that it goes into",
        (CORE + "scoring/test_merging.py",),
    ),
    "merge-threshold": Mutation(
        "scoring/merging.py",
        "torch.lerp(before, mean, renewal)",
        "mean",
        "D2O: the threshold forgets the evictions before",
        (CORE + "scoring/test_merging.py",),
    ),
    "rotary-sign": Mutation(
        "scoring/rotary.py",
        "turned = (turned * cos - rotate_half(turned) * sin)",
        "turned = (turned * cos + rotate_half(turned) * sin)",
        "queries are rotated once more, not back",
        (CORE + "scoring/test_rotary.py",),
    ),
    "mrope-first-axis": Mutation(
        "scoring/rotary.py",
        "positions, least = positions.amax(0), ",
        "positions, least = positions[0], ",
        "text goes on behind an image's time, not behind its largest position",
        (CORE + "scoring/test_rotary.py",),
    ),
    "second-reading-causal": Mutation(
        "scoring/rereading.py",
        "future = column > torch.arange(",
        "future = column >= torch.arange(",
        "a token that is read again does not see itself",
        (CORE + "hooks/test_second_reading.py",),
    ),
    "question-begins-late": Mutation(
        "scoring/vision.py",
        "columns - behind, first)",
        "columns - behind + 1, first)",
        "the first word behind the last image does not observe",
        ("tests/oracle/test_vision_methods.py",),
    ),
    "noise-follows-the-batch": Mutation(
        "scoring/layer_view.py",
        "{view.row_seeds[row]}",
        "{row}",
        "random's draw follows the row's place in the batch",
        (INVARIANTS + "::test_every_method_by_name_decodes_as_the_full_cache_under_that_mask_and_a_row_as_alone",),
    ),
    # -- kernels
    "column-sums-causal": Mutation(
        "kernels/column_sums.py",
        "device=keys.device).triu_(1)",
        "device=keys.device).triu_(2)",
        "column sums: a query sees the token behind it",
        (CORE + "kernels",),
    ),
    "compact-one-head": Mutation(
        "kernels/compact.py",
        "indices[row, head].clamp(min=0)",
        "indices[row, 0].clamp(min=0)",
        "every KV head stores the columns that the first one keeps",
        (CORE + "kernels/test_kernels.py", CORE + "clusters/test_clusters.py"),
    ),
    "ragged-reads-spare": Mutation(
        "kernels/ragged_decode.py",
        "used = slots < lengths[..., None]",
        "used = slots <= lengths[..., None]",
        "ragged decoding attends to a spare row",
        (CORE + "kernels/test_ragged_decode.py",),
    ),
    "quantized-filler": Mutation(
        "kernels/quantization.py",
        "padded[flat.numel() :] = flat[-1:]",
        "padded[flat.numel() :] = 0",
        "the filler widens the range of a group, and so its error",
        (CORE + "cache/test_quantized.py::test_what_fills_the_last_group_up_does_not_widen_its_range",),
    ),
    "think-keys": Mutation(
        "cache/storage/think.py",
        "return (power * squares.sum(2)).topk(",
        "return (power * torch.ones_like(power)).topk(",
        "channels are chosen by queries alone",
        (CORE + "cache/test_think.py",),
    ),
    "think-columns": Mutation(
        "cache/storage/think.py",
        "recent + self.thin.length)",
        "recent)",
        "recent entries of a whole cache have the columns of the first",
        (CORE + "cache/test_think.py",),
    ),
    "think-channels-again": Mutation(
        "cache/memory.py",
        "return self.storage.channels.long()",
        "return (self.storage.channels.long() + 1) % keys.shape[3]",
        "channels change where entries are stored anew",
        (CORE + "cache/test_think.py",),
    ),
    "turboquant-codebook": Mutation(
        "kernels/turboquant.py",
        "density = (1 - x**2) ** ((dim - 3) / 2)",
        "density = (1 - x**2) ** (dim - 3)",
        "the codebook is for vectors of other lengths",
        (CORE + "cache/test_turboquant.py::test_the_error_of_a_unit_vector_is_the_papers",),
    ),
    "turboquant-output": Mutation(
        "kernels/turboquant.py",
        "return value_codec.rotate_back(output)",
        "return value_codec.rotate(output)",
        "a step's output is turned on in place of back",
        (CORE + "kernels/test_packed.py::test_without_a_compiler_one_line_says_so_and_plain_torch_attends",),
    ),
    "turboquant-visible": Mutation(
        "cache/storage/turboquant.py",
        "return packed_decode(query, *self.inner.segments(), pads, self.codecs, scaling)",
        "return packed_decode(query, *self.inner.segments(), None, self.codecs, scaling)",
        "a step attends to unused slots",
        (CORE + "cache/test_turboquant.py::test_a_step_attends_to_what_reading_the_entries_gives",),
    ),
    "packed-total": Mutation(
        "kernels/turboquant.cpp",
        "            total *= shrink;\n",
        "",
        "the weights of earlier blocks count too much once a larger logit comes",
        (CORE + "kernels/test_packed.py::test_attention_over_packed_segments_is_the_references",),
    ),
    "packed-third-bit": Mutation(
        "kernels/turboquant.cpp",
        "high |= uint32_t(code[at] >> 2 & 1) << at;",
        "high |= uint32_t(code[at] >> 1 & 1) << at;",
        "a code of three bits is packed with a wrong high bit",
        (CORE + "kernels/test_packed.py::test_a_packed_token_is_the_references_but_for_rounding",),
    ),
    "turboquant-repacked": Mutation(
        "cache/memory.py",
        "        if self.storage.is_final:\n            last =",
        "        if False:\n            last =",
        "a token that is fed again has all entries quantized a second time",
        (
            CORE + "cache/test_turboquant.py::test_entries_are_packed_once",
            CORE + "cache/test_quantized.py::test_a_token_that_is_fed_again_leaves_the_others_as_they_are",
        ),
    ),
    # -- cache: storage and new tokens
    "segment-start": Mutation(
        "cache/storage/ragged.py",
        "self.starts = self.ends - sizes",
        "self.starts = self.ends - sizes + room",
        "a KV head's segment is looked for behind its place in ragged storage",
        (INVARIANTS + "::test_decoding_equals_the_full_cache_under_a_mask_that_hides_what_was_dropped",),
    ),
    "appended-column": Mutation(
        "cache/storage/dense.py",
        "appended = torch.arange(seen - (self.length - self.entries), seen, device=self.keys.device)",
        "appended = torch.arange(seen - (self.length - self.entries), seen, device=self.keys.device) - 1",
        "a decoded token is noted under the column before it",
        (
            CORE + "cache/test_cache.py",
            INVARIANTS + "::test_kept_indices_are_ascending_columns_of_real_tokens",
        ),
    ),
    "static-cursor": Mutation(
        "cache/storage/static.py",
        "return self.usable & (self.slots < self.cursor)",
        "return self.usable & (self.slots <= self.cursor)",
        "static shapes: a slot that is still empty is attended to",
        (CORE + "cache/test_static.py",),
    ),
    "quantized-residual": Mutation(
        "cache/storage/quantized.py",
        "if self.recent.length >= self.residual:",
        "if self.recent.length > self.residual:",
        "one decoded token more waits in full precision",
        (
            CORE
            + "cache/test_quantized.py::test_decoded_tokens_wait_in_full_precision_until_there_are_kv_residual_of_them",
        ),
    ),
    "quantized-reuse": Mutation(
        "cache/storage/quantized.py",
        "twin.blocks, twin.recent = list(self.blocks), self.recent.fork()",
        "twin.blocks, twin.recent = self.blocks, self.recent.fork()",
        "a question leaves its quantized tokens in the context that the next one reuses",
        (CORE + "policy/test_protocol.py::test_reuse_leaves_every_storage_as_it_was",),
    ),
    "offloaded-reuse": Mutation(
        "cache/storage/offloaded.py",
        "twin.inner, twin.fetched = self.inner.fork(), None",
        "twin.inner, twin.fetched = self.inner, None",
        "a question leaves its offloaded tokens in the context that the next one reuses",
        (CORE + "policy/test_protocol.py::test_reuse_leaves_every_storage_as_it_was",),
    ),
    "ragged-rows": Mutation(
        "cache/storage/ragged.py",
        "sizes = self.sizes[rows]",
        "sizes = self.sizes",
        "ragged storage: beams exchange their entries but not their lengths",
        (CORE + "kernels/test_ragged_decode.py::test_rows_selected_again_attend_to_their_own_entries",),
    ),
    "chunk-pads": Mutation(
        "cache/new_tokens.py",
        "self.columns - length - start, 0)",
        "self.columns - length, 0)",
        "every chunk of a padded row begins with its pads",
        (CORE + "hooks/test_chunked_prefill.py::test_a_row_does_not_depend_on_its_batch_or_padding",),
    ),
    "context-of-the-last": Mutation(
        "cache/new_tokens.py",
        "max(length + wanted, 0) for length in lengths]",
        "max(length + wanted - 1, 0) for length in lengths]",
        "negative context_tokens: the question begins a token early",
        (
            CORE + "policy/test_protocol.py::test_scope_context_keeps_the_question_and_the_budget_of_the_context",
            CORE + "policy/test_protocol.py::test_an_explicit_context_and_a_missing_one",
        ),
    ),
    "context-wrong-end": Mutation(
        "cache/scope.py",
        "first = columns - view.lengths[0]",
        "first = columns - width",
        "scope=context compresses the prompt's end in place of its context",
        (
            CORE + "policy/test_protocol.py::test_decoding_after_scope_context_equals_the_masked_full_cache",
            CORE + "policy/test_protocol.py::test_scope_context_keeps_the_question_and_the_budget_of_the_context",
        ),
    ),
    "not-right-aligned": Mutation(
        "cache/scope.py",
        "order = kept.indices.argsort(dim=-1, stable=True)",
        "order = torch.arange(kept.indices.shape[2], device=kept.indices.device).expand_as(kept.indices).contiguous()",
        "unused slots stay where they are, between entries",
        (
            CORE + "hooks/test_chunked_prefill.py",
            INVARIANTS + "::test_a_second_prompt_sees_what_was_kept_and_is_compressed_in_turn",
        ),
    ),
    # -- cache: a layer's passes
    "continuation-causal": Mutation(
        "cache/passes.py",
        "new = torch.ones(query_length, query_length, dtype=torch.bool, device=device).tril()",
        "new = torch.ones(query_length, query_length, dtype=torch.bool, device=device).tril(1)",
        "a token of a second prompt sees the one behind it",
        (INVARIANTS + "::test_a_second_prompt_sees_what_was_kept_and_is_compressed_in_turn",),
    ),
    "decode-interval": Mutation(
        "cache/passes.py",
        "if self.memory.decoded >= self.choice.policy.decode_interval:",
        "if self.memory.decoded > self.choice.policy.decode_interval:",
        "decoding evicts a step late",
        (
            CORE + "cache/test_decode_eviction.py::test_streamingllm_rolls_a_window_behind_its_sinks",
            CORE + "cache/test_decode_eviction.py::test_memory_stays_bounded_however_long_the_answer_is",
        ),
    ),
    "oldest-queries": Mutation(
        "cache/memory.py",
        "self.latest_queries = [torch.cat(self.latest_queries, dim=2)[:, :, -window:]]",
        "self.latest_queries = [torch.cat(self.latest_queries, dim=2)[:, :, :window]]",
        "the oldest remembered queries vote, not the latest",
        (CORE + "cache/test_decode_eviction.py::test_the_latest_queries_are_remembered_however_long_the_answer_is",),
    ),
    "sums-of-other-rows": Mutation(
        "cache/memory.py",
        "self.sums = None if self.sums is None else self.sums[rows]",
        "self.sums = self.sums",
        "running sums do not follow the rows that beams select",
        (CORE + "cache/test_decode_eviction.py::test_what_is_remembered_of_a_row_follows_it_where_rows_change_places",),
    ),
    "sums-seen": Mutation(
        "cache/choice.py",
        "seen = view.stored.seen - queries.shape[2] + start + some.shape[2]",
        "seen = view.stored.seen",
        "running sums: the queries of an early block see later tokens",
        (CORE + "hooks/test_chunked_prefill.py::test_sums_over_a_long_chunk_are_those_of_all_its_queries_at_once",),
    ),
    "first-token-twice": Mutation(
        "cache/memory.py",
        "masked_fill(last, -1))), seen - 1)",
        "masked_fill(last, -1))), seen)",
        "first_token=compressed: the token that is fed again stands a position late",
        (CORE + "policy/test_protocol.py::test_first_token_compressed_feeds_the_last_prompt_token_on_what_was_kept",),
    ),
    "columns-of-a-second-prompt": Mutation(
        "cache/memory.py",
        "torch.where(kept.indices < 0, -1, kept.indices + first)",
        "torch.where(kept.indices < 0, -1, kept.indices)",
        "a second prompt's entries are noted under the first one's columns",
        (INVARIANTS + "::test_a_second_prompt_sees_what_was_kept_and_is_compressed_in_turn",),
    ),
    "answer-between-chunks": Mutation(
        "cache/memory.py",
        "answer = first - self.columns",
        "answer = 0",
        "decoded tokens do not count where a next prompt comes in chunks",
        (CORE + "hooks/test_chunked_prefill.py::test_a_ratio_counts_what_was_answered_between_two_prompts",),
    ),
    "pads-of-a-chunk-vote": Mutation(
        "cache/passes.py",
        "queries.masked_fill(pads.unsqueeze(-1), torch.nan)",
        "queries",
        "a later chunk's pads vote for stored entries",
        (CORE + "hooks/test_chunked_prefill.py::test_the_pads_of_a_second_prompt_have_no_vote_in_any_chunk",),
    ),
    "shares-of-the-first-layer": Mutation(
        "cache/choice.py",
        "budget * self.num_layers, length)[self.place]",
        "budget * self.num_layers, length)[0]",
        "while decoding every layer takes the first layer's measured share",
        (CORE + "cache/test_decode_eviction.py::test_while_decoding_a_layer_keeps_its_measured_share",),
    ),
    "question-not-kept": Mutation(
        "cache/scope.py",
        "is_question = (rest >= (pads + length)[:, None])",
        "is_question = (rest > (pads + length)[:, None])",
        "scope=context drops the first token of the question",
        (CORE + "policy/test_protocol.py::test_scope_context_keeps_the_question_and_the_budget_of_the_context",),
    ),
    # -- clusters, layer budgets, tokens, policy
    "pads-as-sinks": Mutation(
        "clusters/streamingllm.py",
        "position, tokens = position - padding[..., None],",
        "position, tokens = position - 0 * padding[..., None],",
        "a padded row's first columns, its pads, count as sinks",
        (CORE + "clusters/test_clusters.py",),
    ),
    "window-votes": Mutation(
        "clusters/snapkv.py",
        "device=keys.device) > sizes",
        "device=keys.device) >= sizes",
        "the first token of the window gets votes, which pooling spreads",
        (CORE + "clusters/test_clusters.py",),
    ),
    "global-heads": Mutation(
        "layer_budgets/global_.py",
        "budget * layers * heads)",
        "budget * layers)",
        "the ranking over all layers is cut as if there were one KV head",
        ("tests/oracle/test_attention_methods.py", CORE + "hooks/test_second_reading.py"),
    ),
    "last-token-dropped": Mutation(
        "tokens/base.py",
        'scores[:, -1] = float("inf")',
        "pass",
        "a vision token at the prompt's end, which the answer is read off, may be dropped",
        (CORE + "tokens/test_tokens.py::test_the_last_token_stays_also_where_it_is_a_vision_token",),
    ),
    "option-unchecked": Mutation(
        "policy/policy.py",
        'if evicts and engine.cache_implementation not in ("dynamic", "offloaded"):',
        'if evicts and engine.cache_implementation not in ("dynamic", "offloaded", "static"):',
        "eviction while decoding is accepted where entries are stored once and for all",
        (CORE + "cache/test_static.py::test_static_needs_to_know_its_room_and_takes_no_eviction",),
    ),
    # -- hooks, measuring
    "heads-under-other-masks": Mutation(
        "hooks/attention.py",
        "mask = mask.repeat_interleave(query.shape[1] // kv_heads, dim=1)",
        "mask = mask.repeat(1, query.shape[1] // kv_heads, 1, 1)",
        "query heads attend under the mask of another KV head",
        (INVARIANTS + "::test_a_second_prompt_sees_of_each_head_what_that_head_kept",),
    ),
    "chunks-from-the-front": Mutation(
        "hooks/chunked_prefill.py",
        "stops = range(whole.columns, 0, -size)[::-1]",
        "stops = [*range(size, whole.columns, size), whole.columns]",
        "chunks are counted from the front: a padded row is cut elsewhere than alone",
        (CORE + "hooks/test_chunked_prefill.py::test_a_row_does_not_depend_on_its_batch_or_padding",),
    ),
    "written-back-elsewhere": Mutation(
        "hooks/token_dropping.py",
        "hidden[self.rows, self.source] = output[0] if",
        "hidden[:, -self.source.shape[1] :] = output[0] if",
        "after tokens were dropped, hidden states go back to wrong columns",
        (CORE + "tokens/test_tokens.py::test_a_row_alone_keeps_the_same_tokens_and_has_the_same_logits",),
    ),
    "tower-layer": Mutation(
        "hooks/vision_tower.py",
        "self.attention, self.method = attentions[layer], method",
        "self.attention, self.method = attentions[-1], method",
        "VisionZip reads the vision tower's last layer, whatever layer is asked for",
        (
            CORE
            + "tokens/test_tokens.py::test_visionzip_keeps_dominant_tokens_and_merges_the_others_into_contextual_ones",
        ),
    ),
    "evs-first-frame": Mutation(
        "tokens/evs.py",
        "now, then = (tokens.hidden[row, places].float() for places in (columns, before))",
        "now, then = (tokens.hidden[row, places].float() for places in (columns, frames[0]))",
        "EVS compares each frame with the first, not with the one before",
        (CORE + "tokens/test_tokens.py::test_evs_keeps_the_first_frame_and_what_has_changed_since_the_frame_before",),
    ),
    "fused-without-the-first": Mutation(
        "tokens/framefusion.py",
        "hidden[columns[~goes]] = (sums / into.bincount()[:, None]).to(hidden.dtype)",
        "hidden[columns[~goes]] = (sums / into.bincount().sub(1).clamp(min=1)[:, None]).to(hidden.dtype)",
        "FrameFusion's mean does not count the token that stays",
        (CORE + "tokens/test_tokens.py::test_framefusion_merges_runs_of_like_tokens_at_a_place_into_their_mean",),
    ),
    "fused-without-a-look-back": Mutation(
        "tokens/framefusion.py",
        "return [(budget * num_layers - held) / (num_layers - layer) for layer, held in enumerate(before)]",
        "return [float(budget) for layer, held in enumerate(before)]",
        "FrameFusion forgets what the layers before have held: more stays than was asked for",
        (
            CORE
            + "tokens/test_tokens.py::test_framefusion_prunes_by_the_attention_of_the_layer_before_where_nothing_is_"
            "alike",
            "tests/oracle/authors/test_token_methods.py",
        ),
    ),
    "duplicates-stay": Mutation(
        "tokens/vispruner.py",
        "order = likeness.argsort(descending=True, stable=True)",
        "order = likeness.argsort(descending=False, stable=True)",
        "VisPruner drops the most distinct, not the duplicates",
        (CORE + "tokens/test_tokens.py::test_vispruner_keeps_what_the_tower_looks_at_and_what_has_no_duplicate",),
    ),
    "farthest-from-the-latest": Mutation(
        "tokens/divprune.py",
        "apart = torch.minimum(apart, distances) if step else distances",
        "apart = distances",
        "DivPrune keeps what is far from the latest token that was chosen, not from all",
        (CORE + "tokens/test_diversity.py", "tests/oracle/authors/test_token_methods.py"),
    ),
    "kernel-of-one-side": Mutation(
        "tokens/cdpruner.py",
        "chosen = most_diverse(relevance[:, None] * states[columns], budget)",
        "chosen = most_diverse(relevance[:, None].sqrt() * states[columns], budget)",
        "CDPruner's kernel has the relevance of one of its two tokens only",
        (CORE + "tokens/test_diversity.py", "tests/oracle/authors/test_token_methods.py"),
    ),
    "newline-between-videos": Mutation(
        "hooks/video_frames.py",
        "columns = columns[count * size + rest :]",
        "columns = columns[count * size :]",
        "a second video's frames begin at the first one's newline",
        (CORE + "tokens/test_tokens.py::test_the_frames_of_two_videos_in_a_row_leave_out_the_newlines_between_them",),
    ),
    "mrope-behind-an-image": Mutation(
        "hooks/second_reading.py",
        "axes.amax(0, keepdim=True).expand_as(axes)",
        "axes[:1].expand_as(axes)",
        "what is read again goes on behind an image's time, not its largest position",
        (CORE + "hooks/test_second_reading.py",),
    ),
    "left-after-an-error": Mutation(
        "hooks/session.py",
        "self._config._attn_implementation = self._base",
        "self._config._attn_implementation = PREFIX + self._base if exception[0] else self._base",
        "a model is not given back when a generation fails",
        (
            CORE + "tokens/test_tokens.py::test_no_hook_outlives_the_context_also_after_an_exception",
            CORE + "hooks/test_chunked_prefill.py::test_nothing_stays_in_the_model",
        ),
    ),
    "another-prompts-pass": Mutation(
        "hooks/shared_prompt.py",
        "if self.known is not None and self.known.is_of(inputs):",
        "if self.known is not None:",
        "a shared prompt answers for another batch",
        (CORE + "hooks/test_shared_prompt.py::test_a_pass_is_not_taken_for_that_of_another_batch",),
    ),
    "resumed-prompt-sees-ahead": Mutation(
        "cache/resumed.py",
        ".tril(columns - query_length)",
        ".tril(columns - query_length + 1)",
        "behind a known beginning a token sees the one behind it",
        (CORE + "hooks/test_prefix_cache.py",),
    ),
    "adapters-share-beginnings": Mutation(
        "hooks/prefix_cache.py",
        "identity = (model, attention, decoder.dtype, *_adapters(decoder))",
        "identity = (model, attention, decoder.dtype)",
        "a prompt goes on behind states that another adapter made",
        (CORE + "hooks/test_prefix_cache.py::test_models_dtypes_and_adapters_do_not_share",),
    ),
    "beginning-without-positions": Mutation(
        "hooks/prefix_cache.py",
        "parts.append(positions[..., row % rows, :].reshape(-1, parts[0].shape[0]).T)",
        "pass",
        "the same tokens at other positions are taken for the same",
        (CORE + "hooks/test_prefix_cache.py::test_the_same_tokens_at_other_positions_are_others",),
    ),
    "views-keep-the-whole-alive": Mutation(
        "cache/prefix_tree.py",
        ".detach().clone(memory_format=torch.contiguous_format)",
        ".detach()",
        "a prefix cache holds more bytes than it counts",
        (CORE + "cache/test_prefix_tree.py",),
    ),
    "pads-of-other-rows": Mutation(
        "cache/storage/dense.py",
        "self.pads = None if self.pads is None else self.pads[rows]",
        "self.pads = self.pads",
        "a cache that keeps everything: rows change places, their pads do not",
        (CORE + "cache/test_cache.py::test_pads_that_are_stored_follow_their_row",),
    ),
    "scores-in-bf16": Mutation(
        "scoring/windows.py",
        "recent = queries[:, :, -window:].float().reshape(batch, kv_heads, groups * window, head_dim)\n"
        "    logits = recent @ keys.float().transpose(2, 3) * scaling",
        "recent = queries[:, :, -window:].reshape(batch, kv_heads, groups * window, head_dim)\n"
        "    logits = recent @ keys.transpose(2, 3) * scaling",
        "attention scores of bf16 states are rounded to bf16",
        (CORE + "clusters/test_clusters.py::test_scores_are_fp32_also_for_bf16_states",),
    ),
    "threshold-of-no-entry": Mutation(
        "scoring/merging.py",
        "threshold = torch.where(merged.any(-1), torch.lerp(before, mean, renewal), before)",
        "threshold = torch.lerp(before, mean, renewal)",
        "D2O: the threshold of a head is lost in an eviction that takes nothing of it",
        (CORE + "scoring/test_merging.py::test_the_threshold_of_d2o_outlives_an_eviction_without_a_loss",),
    ),
    "r-kv-counts-pads": Mutation(
        "clusters/rkv.py",
        "count = (count - padding)[..., None]",
        "pass",
        "R-KV: the mean likeness of a padded row's keys is divided by its pads too",
        (CORE + "clusters/test_clusters.py::test_r_kvs_mean_likeness_counts_no_pads",),
    ),
    "offloaded-for-good": Mutation(
        "lmms_eval_plugins/model/answering.py",
        "        try:\n            yield\n        finally:\n            self.compression = before",
        "        yield\n        self.compression = before",
        "a batch that does not fit even when offloaded leaves the cell's compression changed",
        ("tests/lmms_eval_plugins/model/test_lm.py::test_memory_that_never_suffices_and_other_errors_end_the_run",),
    ),
    "clock-not-synchronised": Mutation(
        "measure.py",
        "synchronise(input_ids.device)\n        self.times.append",
        "self.times.append",
        "time is read before the device is done",
        (CORE + "test_measure.py",),
    ),
    "end-not-counted": Mutation(
        "measure.py",
        "return (before + ends.any(1)).tolist()",
        "return before.tolist()",
        "the end-of-sequence token is not counted",
        (CORE + "test_measure.py",),
    ),
    # -- what the authors' code keeps, of recorded states
    "snapkv-window": Mutation(
        "clusters/snapkv.py",
        "return [self.window_size] * len(view.lengths)",
        "return [self.window_size + 1] * len(view.lengths)",
        "the observation window is one too long",
        recorded("kvcache_factory snapkv"),
    ),
    "snapkv-pools-first": Mutation(
        "clusters/snapkv.py",
        "pool_scores(votes.mean(2), self.kernel_size, self.pooling)",
        "pool_scores(votes, self.kernel_size, self.pooling).mean(2)",
        "votes are pooled before the mean over the query heads",
        recorded("kvcache_factory snapkv, preset=longbench"),
    ),
    "pyramid-window-inside": Mutation(
        "layer_budgets/pyramid.py",
        "rest = budget - window\n        if length < 2 * rest",
        "rest, window = budget, 0\n        if length < 2 * rest",
        "the pyramid is over the window too",
        recorded("kvcache_factory pyramidkv"),
    ),
    "adakv-no-floor": Mutation(
        "scoring/selection.py",
        "+ safeguard * rest / scores.shape[1]",
        "+ safeguard * 0 / scores.shape[1]",
        "no head is sure of a share",
        recorded("adakv adakv"),
    ),
    "cake-variance": Mutation(
        "clusters/cake.py",
        "(in_window.sum(3) - 1).clamp(min=1)",
        "in_window.sum(3)",
        "the variance is a population's",
        recorded("cakekv cake, kernel_size=1"),
    ),
    "criticalkv-epsilon": Mutation(
        "clusters/criticalkv.py",
        "(scores + self.epsilon)",
        "(scores + 0.01)",
        "attention counts less beside the values",
        recorded("kvpress criticalkv"),
    ),
    "chunkkv-mean": Mutation(
        "clusters/chunkkv.py",
        ".unflatten(-1, (-1, size)).mean(-1)",
        ".unflatten(-1, (-1, size)).amax(-1)",
        "a chunk counts as its best token",
        recorded("kvpress chunkkv"),
    ),
    "rkv-repeated": Mutation(
        "clusters/rkv.py",
        "alike > similar, column, -1",
        "alike > 2, column, -1",
        "of tokens that repeat each other all count as repeated",
        recorded("r_kv r-kv"),
    ),
    "rkv-lambda": Mutation(
        "clusters/rkv.py",
        "Field(ge=0, le=1)] = 0.07",
        "Field(ge=0, le=1)] = 0.1",
        "lambda is the paper's",
        recorded("r_kv r-kv"),
    ),
    "lazy-sinks": Mutation(
        "layer_budgets/lazy.py",
        "FIRST, LAST = 4, 1024",
        "FIRST, LAST = 5, 1024",
        "a lazy layer is judged by five first tokens",
        recorded("simlayerkv simlayerkv, variant=code"),
    ),
    "h2o-recent": Mutation(
        "clusters/h2o.py",
        "return int(self.recent * budget)",
        "return int(self.recent * budget) + 1",
        "one recent token too many",
        recorded("h2o h2o"),
    ),
    "tova-head": Mutation(
        "clusters/tova.py",
        "weights[..., 0, :].mean(2)",
        "weights[..., 0, :].amax(2)",
        "the query head that attends most decides",
        recorded("tova tova"),
    ),
    "streaming-sinks": Mutation(
        "clusters/streamingllm.py",
        "sinks: NonNegativeInt = 4",
        "sinks: NonNegativeInt = 3",
        "one sink too few",
        recorded("streaming_llm streamingllm"),
    ),
    "cam-share": Mutation(
        "scoring/merging.py",
        "values.float() / followers",
        "values.float() / (followers + 1)",
        "each follower takes too little",
        recorded("cam cam, as a stream"),
    ),
    "d2o-weight": Mutation(
        "scoring/merging.py",
        "partial(into_most_similar, share=weighted, renewal=0.5)",
        "partial(into_most_similar, share=average, renewal=0.5)",
        "merged entries count in full",
        recorded("d2o d2o, each head alone"),
    ),
    "look-m-weight": Mutation(
        "scoring/merging.py",
        "share=weighted, above_mean=True",
        "share=weighted, above_mean=False",
        "what is unlike is merged too",
        recorded("look_m look-m, weighted merging"),
    ),
    "lagkv-range": Mutation(
        "clusters/lagkv.py",
        "((tokens - least) / span)",
        "(tokens - least)",
        "keys are not scaled by the next partition's range",
        recorded("lagkv lagkv, lag 20"),
    ),
    "knorm-l1": Mutation(
        "clusters/knorm.py",
        "keys.float().norm(dim=-1)",
        "keys.float().norm(p=1, dim=-1)",
        "the norm is L1",
        recorded("l2compress knorm"),
    ),
    "keydiff-anchor": Mutation(
        "clusters/keydiff.py",
        "F.normalize(unit.sum(2, keepdim=True), dim=-1)",
        "F.normalize(keys.float().sum(2, keepdim=True), dim=-1)",
        "the anchor is that of the keys as they are",
        recorded("kvpress_keys keydiff"),
    ),
    "cur-sinks": Mutation(
        "clusters/cur.py",
        'scores[..., : self.sinks] = float("inf")',
        'scores[..., : self.sinks - 1] = float("inf")',
        "one sink too few",
        recorded("kvpress_keys cur"),
    ),
    "capkv-weights": Mutation(
        "clusters/capkv.py",
        "scaled = values * (weight + EPSILON)[..., None]",
        "scaled = values",
        "every value counts alike in the capacity",
        ("tests/oracle/test_key_value_methods.py", *recorded("capkv capkv")),
    ),
    "finch-normalized": Mutation(
        "clusters/finch.py",
        "weights = weights * before[:, None, None, :, None]",
        "weights = weights * before[:, None, None, :, None] ** 0",
        "weights do not count times the keys before a query",
        ("tests/oracle/test_attention_methods.py",),
    ),
    "leverage-centred": Mutation(
        "clusters/leverage.py",
        "centred = (keys - mean).masked_fill(",
        "centred = keys.masked_fill(",
        "keys are not centred",
        ("tests/oracle/test_key_value_methods.py", *recorded("compactor leverage")),
    ),
    "leverage-rotated": Mutation(
        "scoring/layer_view.py",
        "return self.rotary.unrotated(keys)",
        "return keys.float()",
        "leverage is that of rotated keys",
        ("tests/oracle/test_key_value_methods.py", *recorded("compactor leverage")),
    ),
    "non-causal-scaled": Mutation(
        "clusters/non_causal_attention.py",
        "logits = asks.float() @ answers",
        "logits = asks.float() / asks.shape[-1] ** 0.5 @ answers",
        "the logits of a chunk are scaled",
        ("tests/oracle/test_key_value_methods.py", *recorded("compactor non-causal-attention, chunk_size=16")),
    ),
    "compactor-blending": Mutation(
        "clusters/compactor.py",
        "evicted = [1 - budget / tokens for",
        "evicted = [budget / tokens for",
        "leverage weighs as much as is kept, not as is evicted",
        ("tests/oracle/test_key_value_methods.py", *recorded("compactor compactor")),
    ),
    "morphkv-window": Mutation(
        "clusters/morphkv.py",
        "logits[..., -window:] = -torch.inf",
        "logits[..., -1:] = -torch.inf",
        "the window takes part of its own attention",
        ("tests/oracle/test_attention_methods.py", *recorded("morphkv morphkv, window_size=8, fusion=max")),
    ),
    "lava-norm": Mutation(
        "clusters/lava.py",
        "values.float().abs().sum(-1)",
        "values.float().norm(dim=-1)",
        "the largest value is that of the L2 norm",
        ("tests/oracle/test_attention_methods.py",),
    ),
    "lava-window": Mutation(
        "layer_budgets/lava.py",
        "window = min(view.settings.query_window, budget)",
        "window = 0",
        "the window is shared out with the rest",
        ("tests/oracle/authors/test_shared_budgets.py",),
    ),
    "entropy-gate": Mutation(
        "clusters/entropy_gated_chunkkv.py",
        "turn = torch.where(gated[..., None] & (within >= spiky), later, first)",
        "turn = first",
        "chunks that owe their score to few tokens are kept whole",
        ("tests/oracle/authors/test_entropy_gated_chunkkv.py",),
    ),
    "entropy-median": Mutation(
        "clusters/entropy_gated_chunkkv.py",
        ".clamp(min=0) // 2)",
        ".clamp(min=0))",
        "the gate opens at the largest, not the median",
        ("tests/oracle/authors/test_entropy_gated_chunkkv.py",),
    ),
    "learned-stored": Mutation(
        "clusters/learned.py",
        "place = view.stored.columns - (view.stored.seen - foretold.shape[2])",
        "place = view.stored.columns - (view.stored.seen - foretold.shape[2]) - 1",
        "a stored token carries its neighbour's score",
        ("tests/kvcompress/learned/test_learned.py",),
    ),
    "learned-layer": Mutation(
        "clusters/learned.py",
        "self.trained(self.checkpoint).weights(layer_idx, hidden)",
        "self.trained(self.checkpoint).weights(0, hidden)",
        "every layer has the first one's weights",
        ("tests/kvcompress/learned/test_learned.py",),
    ),
    "fastkvzip-sinks": Mutation(
        "clusters/fastkvzip.py",
        "(logits - sinks.logsumexp(-1)).sigmoid()",
        "(logits - sinks.amax(-1)).sigmoid()",
        "a token competes with the strongest sink alone",
        ("tests/oracle/authors/test_learned.py",),
    ),
    "kvzap-gelu": Mutation(
        "clusters/kvzap.py",
        "inner = F.gelu(",
        "inner = F.relu(",
        "the surrogate's layers have another nonlinearity between them",
        ("tests/oracle/authors/test_learned.py",),
    ),
    "places-origin": Mutation(
        "scoring/places.py",
        "before = kept.indices[..., :some] - pads",
        "before = used[..., :some].cumsum(-1) - 1",
        "a key is moved anew from where another one came from",
        ("tests/kvcompress/clusters/test_positions.py",),
    ),
    "kvcompose-groups": Mutation(
        "scoring/rereading.py",
        'return best.amax(2) if group_votes == "max" else best.mean(2)',
        "return best.amax(2)",
        "of a KV head's query heads the one that attends most counts",
        ("tests/kvcompress/hooks/test_second_reading.py",),
    ),
    "composite-first": Mutation(
        "layer_budgets/composite.py",
        "torch.cat([first, measured[1:]])",
        "measured",
        "the first layer counts as any other",
        recorded("kvcompose kvcompose"),
    ),
    "kvzip-sinks": Mutation(
        "clusters/kvzip.py",
        'scores.masked_fill(position < self.sinks, float("inf"))',
        "scores",
        "the first tokens can be cut",
        recorded("kvzip kvzip"),
    ),
    "mixkv-mean": Mutation(
        "clusters/mixkv.py",
        'if self.of_variant("averages_window"):',
        'if not self.of_variant("averages_window"):',
        "the mean key leaves the window out",
        recorded("mixkv mixkv"),
    ),
    "csp-cross": Mutation(
        "clusters/csp.py",
        "cross: Share = 0.5",
        "cross: Share = 0.1",
        "a tenth goes across modalities",
        ("tests/oracle/authors/test_csp.py",),
    ),
    "meda-entropy": Mutation(
        "layer_budgets/entropy.py",
        "return measured.double().softmax(0).tolist()",
        "return measured.double().tolist()",
        "layers share in proportion to the entropy, not its softmax",
        recorded("meda meda"),
    ),
    "prefixkv-heads": Mutation(
        "clusters/prefixkv.py",
        'head_budget: ClassVar[str] = "shared"',
        'head_budget: ClassVar[str] = "uniform"',
        "each KV head keeps its own tokens",
        recorded("prefixkv prefixkv"),
    ),
    "infinipot-recent": Mutation(
        "clusters/infinipot_v.py",
        "is_recent = frame >= ended - max(1, int(self.recent * frames))",
        "is_recent = frame >= ended - max(1, int(self.recent * frames)) - 1",
        "one recent frame too many",
        recorded("infinipot_v infinipot-v"),
    ),
    "tgv-weights": Mutation(
        "clusters/tgv_kv.py",
        "weight = received / column * observers",
        "weight = received * observers",
        "words are not weighed by how many see them",
        recorded("tgv_kv tgv-kv"),
    ),
    # -- calibration
    "q-filters-sign": Mutation(
        "clusters/q_filters.py",
        "keepdim=True) < 0, -direction, direction)",
        "keepdim=True) < 0, direction, direction)",
        "a filter points wherever the decomposition left it",
        (CORE + "calibration/test_collect.py", "tests/oracle/authors/test_calibrations.py"),
    ),
    "triattention-next": Mutation(
        "clusters/triattention.py",
        "ahead = 1 + 2 ** torch.arange(",
        "ahead = 2 ** torch.arange(",
        "distances are counted from the last token, not from the one to come",
        (CORE + "calibration/test_collect.py",),
    ),
    "prefixkv-interpolated": Mutation(
        "layer_budgets/prefix.py",
        "self.sizes[:, step], self.sizes[:, step + 1], place - step)",
        "self.sizes[:, step], self.sizes[:, step + 1], 1.0)",
        "layer sizes are those of the next ratio of the file",
        (CORE + "calibration/test_collect.py",),
    ),
    "mixkv-known": Mutation(
        "clusters/mixkv.py",
        "if self.calibration is not None:",
        "if self.calibration is None:",
        "the file's weights are not used",
        (CORE + "calibration/test_collect.py",),
    ),
    "calibration-model": Mutation(
        "calibration/files.py",
        "if (found.fingerprint, found.layers) != (this.fingerprint, this.layers):",
        "if found.layers != this.layers:",
        "another architecture's file is taken",
        (CORE + "calibration/test_files.py",),
    ),
    "calibration-hash": Mutation(
        "lmms_eval_plugins/cells/identity.py",
        "hashlib.sha256(known).hexdigest()",
        "str(calibration)",
        "a cell stays when its calibration is another",
        ("tests/lmms_eval_plugins/test_calibrate.py",),
    ),
}
