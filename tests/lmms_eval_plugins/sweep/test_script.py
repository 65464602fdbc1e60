"""scripts/run_sweep.sh: hands its arguments and the exit code through, from any folder."""

from ..test_run_eval import ROOT, environment, run_eval  # noqa: F401 (a fixture)

SCRIPT = ROOT / "scripts" / "run_sweep.sh"


def test_arguments_and_exit_code_pass_through(environment, tmp_path):  # noqa: F811
    done = run_eval(environment, "a sweep.yaml", "--trials", "0", cwd=tmp_path, script=SCRIPT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: argument --trials: '0' is not a whole number of at least 1"
    assert "-m|lmms_eval_plugins.sweep|run|a sweep.yaml|--trials|0|" in environment[1].read_text()


def test_help_shows_the_usage(environment):  # noqa: F811
    done = run_eval(environment, "--help", script=SCRIPT)
    assert done.returncode == 0
    assert "run_sweep.sh CONFIG [flags] [parameter=value ...]" in done.stdout
