from lmms_eval_plugins.report.appearance import OFTEN_TOGETHER, colour, markers


def test_methods_that_are_often_together_have_colours_of_their_own():
    assert len({colour(method) for method in OFTEN_TOGETHER}) == len(OFTEN_TOGETHER)


def test_no_two_series_share_colour_and_marker():
    methods = {f"snapkv window_size={size}": "snapkv" for size in (8, 16, 32)}
    methods |= {f"mine{number}": f"mine{number}" for number in range(46)}
    shown = {
        (colour(method), marker) for method, marker in zip(methods.values(), markers(methods).values(), strict=True)
    }
    assert len(shown) == len(methods)
