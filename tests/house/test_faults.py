"""Every public report of a fault has a test here that cites it, or a reason why not."""

import faults


def test_every_report_is_played_or_says_why_not() -> None:
    assert faults.gaps() == []


def test_every_kind_has_a_rule_and_a_test() -> None:
    cited = faults.citations()
    for code, kind in faults.reports().items():
        assert kind["rule"], code
        assert any(case["report"] in cited for case in kind["cases"]), code
