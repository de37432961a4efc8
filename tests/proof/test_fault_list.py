"""The list of faults in docs/faults.md leads somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_the_list_names_are_there() -> None:
    """docs/faults.md leads to something, and names every test that was written for it."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    own = {
        (str(path.relative_to(ROOT)), name)
        for path in Path(__file__).parent.glob("test_fault_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    mine = ("tests/proof/test_fault_list.py", "test_the_tests_that_the_list_names_are_there")
    assert own - named <= {mine}
