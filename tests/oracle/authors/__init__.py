"""What the authors' own code keeps, recorded, and what ours keeps of the same states.

A script per repository runs the released functions and writes `fixtures/<script>.npz`:

    git clone https://github.com/Zefan-Cai/KVCache-Factory && git -C KVCache-Factory checkout c97f9d7
    python -m tests.oracle.authors.kvcache_factory KVCache-Factory

A script says how the authors' function is called, in `recordings`, which yields what it keeps; `script.py` runs it.
`presses.py` calls presses of kvpress and its forks, `released.py` parts of a file. `states.py` says what both are fed,
`recording.py` how it is written down, `ours.py` runs our side. `test_authors.py` compares every recording; what is not
equal is named in the script's `DIFFERENCES`. `benchmarks/fidelity.py` makes the table of the docs.

Methods that drop tokens have a harness of their own: `token_recording.py`, `fixtures/tokens/`, `test_token_methods.py`;
their scripts are fastv, sparsevlms, visionzip, vispruner, llava_prumerge, divprune, cdpruner, dycoke, evs,
framefusion, fastvid, holitom, lightcompress, pyramiddrop and vidcom2.
"""
