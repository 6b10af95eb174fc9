"""``plugins`` in the YAML: every command knows the policies and backends of a module, and a broken one is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_kit import ROOT

from tests import forked
from tests.contract.kit import tierfall_command
from tierfall.backends.toolkit import object_store as backends
from tierfall.config import load_config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind
from tierfall.policies import registry

EXAMPLES = ROOT / "examples" / "plugins"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Forget what is imported and registered meanwhile."""
    modules, path = set(sys.modules), list(sys.path)
    policies, opened = dict(registry._policies), dict(backends._registered)
    yield
    assert sys.path == path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for known, before in ((registry._policies, policies), (backends._registered, opened)):
        known.clear()  # type: ignore[attr-defined]
        known.update(before)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path, memory: Path) -> Path:
    """A folder with a policy, a backend and a file that uses both; it is not where the commands are started."""
    for name in ("milestones", "table"):
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    write(tmp_path, memory, ["milestones", "./table.py"])
    return tmp_path


def write(folder: Path, memory: Path, plugins: object) -> None:
    config = {
        "run": "x",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(memory)},
            {
                **{"name": "disk", "kind": "file", "path": str(folder / "disk")},
                "retain": {"last": 1, "milestones": 3},
            },
            {"name": "db", "kind": "object", "url": f"table://{folder}/objects.db"},
        ],
        "plugins": plugins,
    }
    (folder / "tiers.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def test_a_module_that_the_program_has_imported_is_not_imported_again(
    place: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training script that registers a policy itself names itself, so that commands know it too."""
    rule = (EXAMPLES / "milestones.py").read_text()
    script = place / "train.py"
    script.write_text(
        f"{rule}\nprint('imported')\nif __name__ == '__main__':\n    import tierfall.config\n"
        f"    print(tierfall.config.load_config('{place}/tiers.yaml').plugins)\n"
    )
    write(place, memory, ["train", "table"])
    config = yaml.safe_load((place / "tiers.yaml").read_text())
    del config["tiers"][2]  # a command would wait for a database that is not there yet
    (place / "tiers.yaml").write_text(yaml.safe_dump(config))
    done = forked.run([str(script)], cwd=Path("/"))
    assert done.stdout.splitlines()[0] == "imported", done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert tierfall_command("ls", "--config", str(place / "tiers.yaml")).out.startswith("imported")


def test_a_module_may_import_what_is_beside_it(place: Path, memory: Path) -> None:
    (place / "helper_beside.py").write_text("BASE = 3\n")
    text = (place / "milestones.py").read_text()
    (place / "milestones.py").write_text(f"from helper_beside import BASE\n{text}")
    load_config(place / "tiers.yaml")
    assert registry.find(PolicyKind.RETAIN, "milestones") is not None


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (
            ["milestone"],
            r"plugins\[0\]: there is no module milestone: expected a file in .*, such as milestone.py, or a module",
        ),
        (["./none.py"], r"plugins\[0\]: there is no module ./none.py: expected a file in"),
        (["no.such.module"], r"there is no module no.such.module: expected"),
        (["broken"], r"the module broken cannot be imported: ZeroDivisionError\(.*; repair it"),
        (["lacking"], r"the module lacking cannot be imported: ModuleNotFoundError\(\"No module"),
        (["wrong"], "the module wrong cannot be imported: SyntaxError"),
        (["script"], "the module script cannot be imported: SystemExit.*__name__ == '__main__'"),
        (["twice"], "the module twice cannot be imported: ConfigError.*choose another name"),
        (["json.py"], "another module has the name json .*: rename the file"),
        ("milestones", 'plugins: "milestones" does not fit; expected a list'),
        ([3], r"plugins\[0\]: 3 is not a module; expected the name of a module, or the path"),
        ([""], r'plugins\[0\]: "" is not a module'),
        (["${env:NOT_SET_AT_ALL}"], "environment variable NOT_SET_AT_ALL is not set"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_file_line_and_what_to_do(
    place: Path, memory: Path, plugins: object, message: str
) -> None:
    (place / "broken.py").write_text("1 / 0\n")
    (place / "lacking.py").write_text("import no_such_module_anywhere\n")
    (place / "wrong.py").write_text("def (:\n")
    (place / "script.py").write_text("import sys\nsys.exit('usage: script.py DATA')\n")
    (place / "twice.py").write_text(
        "from tierfall.policies import register\n@register('retain', 'last')\n"
        "def mine(tier, rules, now_s):\n    return {}\n"
    )
    (place / "json.py").write_text("")
    write(place, memory, plugins)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(place / "tiers.yaml")
    assert f"{place}/tiers.yaml:" in str(caught.value)
