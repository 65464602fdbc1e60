"""The default that an option's help names, in parentheses at its end, is the one that it has."""

import argparse
import re

from kvcompress.bench.command import launches_parser as launches
from kvcompress.bench.command import parser as bench
from kvcompress.bench.command import throughput_parser as throughput
from kvcompress.speech.command import parser as speech
from lmms_eval_plugins.cells.request import flag_parser
from lmms_eval_plugins.leaderboard.command import parser as leaderboard
from lmms_eval_plugins.long_pack.__main__ import parser as long_pack
from lmms_eval_plugins.report.heatmap_command import parser as heatmap
from lmms_eval_plugins.report.html.report_command import parser as report
from lmms_eval_plugins.report.html.show_command import parser as show
from lmms_eval_plugins.report.metrics_command import parser as metrics
from lmms_eval_plugins.reproduce.__main__ import parser as reproduce
from lmms_eval_plugins.sweep.__main__ import parser as sweep

PARSERS = {"bench": bench, "speech": speech, "run_eval": flag_parser, "report": report, "show": show}
PARSERS |= {"metrics": metrics, "reproduce": reproduce, "sweep": sweep, "heatmap": heatmap, "long_pack": long_pack}
PARSERS |= {"leaderboard": leaderboard, "launches": launches, "throughput": throughput}


def test_a_default_is_the_one_that_its_help_names():
    compared = 0
    for command in PARSERS:
        for option in PARSERS[command]()._actions:
            named = re.search(r"\(([\w./, -]+)\)$", option.help or "")
            if named and option.default not in (None, argparse.SUPPRESS):
                default = option.default if isinstance(option.default, list) else [option.default]
                assert " ".join(map(str, default)) == named[1], (command, option.option_strings)
                compared += 1
    assert compared > 40
