"""What is deployed is what was written, for the right processor, compiled, and nothing else."""

import importlib.util
import marshal
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType

import pytest

from local import sizes
from tests.packaging.artifacts import FUNCTIONS, ROOT, Artifacts

# One worker builds, and reads what it built; a second would do the same again.
pytestmark = pytest.mark.xdist_group("artifacts")

ELF = b"\x7fELF"
# e_machine, at offset 18: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
MACHINES = {"x86_64": 62, "arm64": 183}

# 27 MB at the time of writing, of which 15 are compiled libraries; `make sizes` tells.
MOST_BYTES = 32_000_000

# PEP 552: bit 0 of the flags says hash-based, bit 1 says that it is checked against the source at import.
UNCHECKED_HASH = 1


def test_functions_hold_their_handler_alone(artifacts: Artifacts) -> None:
    """A function's archive is its handler: no tests, no requirements, no caches."""
    for name in FUNCTIONS:
        files = [path.relative_to(artifacts.function(name)) for path in artifacts.function(name).rglob("*")]
        assert files == [Path("handler.py")], name


def test_libraries_are_of_the_target_architecture(artifacts: Artifacts) -> None:
    """Each compiled library is for the processor that the functions run on."""
    libraries = {path.name: path.read_bytes()[:20] for path in artifacts.files() if path.read_bytes()[:4] == ELF}
    assert {name.split(".")[0] for name in libraries} >= {"_psycopg", "pq", "_pydantic_core"}
    machines = {name: int.from_bytes(header[18:20], "little") for name, header in libraries.items()}
    assert set(machines.values()) == {MACHINES[artifacts.architecture]}, machines


def test_layers_are_compiled(artifacts: Artifacts) -> None:
    """Each module has bytecode of this very source, which Python loads without looking at a file's time."""
    handlers = {artifacts.function(name) / "handler.py" for name in FUNCTIONS}
    sources = set(artifacts.files(".py")) - handlers
    assert {"charging", "psycopg", "pydantic"} <= {path.parent.name for path in sources}
    for source in sources:
        compiled = Path(importlib.util.cache_from_source(source)).read_bytes()
        assert compiled[:4] == importlib.util.MAGIC_NUMBER, source
        assert int.from_bytes(compiled[4:8], "little") == UNCHECKED_HASH, source
        assert compiled[8:16] == importlib.util.source_hash(source.read_bytes()), source
    assert len(list(artifacts.files(".pyc"))) == len(sources)


def test_tracebacks_name_the_paths_of_lambda(artifacts: Artifacts) -> None:
    """Bytecode says where the module is in Lambda, not where it was built."""
    for path in artifacts.files(".pyc"):
        code = marshal.loads(path.read_bytes()[16:])  # noqa: S302 - it was compiled here a moment ago
        assert isinstance(code, CodeType)
        assert code.co_filename.startswith("/opt/python/"), path


def test_artifacts_say_nothing_of_where_they_were_built(artifacts: Artifacts) -> None:
    """No path of this checkout, no address of a package index, no note of the installer."""
    files = list(artifacts.files())
    for path in files:
        content = path.read_bytes()
        assert str(ROOT).encode() not in content, path
        assert b"pythonhosted.org/packages" not in content, path
    assert {path.name for path in files}.isdisjoint({"RECORD", "REQUESTED", "INSTALLER", "direct_url.json"})


def test_layers_hold_no_tests(artifacts: Artifacts) -> None:
    """Tests, and command-line scripts, are not deployed."""
    paths = [path.relative_to(artifacts.folder) for path in artifacts.files()]
    assert {part for path in paths for part in path.parts[:-1]}.isdisjoint({"bin", "test", "tests", "testing"})
    assert [path for path in paths if fnmatch(path.name, "test_*") or fnmatch(path.name, "*_test.*")] == []


def test_layers_hold_what_is_run_and_no_more(artifacts: Artifacts) -> None:
    """Modules, their bytecode, compiled libraries, and of each package its version and its licence."""
    site = artifacts.layer("DependenciesLayer") / "python"
    run = ("*.py", "*.pyc", "*.so", "*.so.*")
    others = {
        str(path.relative_to(site))
        for path in site.rglob("*")
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in run)
    }
    described = {path.split("/")[0] for path in others if fnmatch(path, "*.dist-info/METADATA")}
    assert {path.split("/")[0].split("-")[0] for path in described} >= {"psycopg", "pydantic", "pydantic_core"}
    kept = ("*.dist-info/METADATA", "*.dist-info/LICEN[CS]E*", "*.dist-info/licenses/*")
    assert [path for path in others if not any(fnmatch(path, pattern) for pattern in kept)] == []


def test_no_file_is_deployed_twice(artifacts: Artifacts) -> None:
    """Layers lie one over another in /opt: what two of them held, one would hide."""
    for name in FUNCTIONS:
        files = [
            path.relative_to(layer) for layer in artifacts.layers(name) for path in layer.rglob("*") if path.is_file()
        ]
        assert len(files) == len(set(files)), name


def test_a_function_and_its_layers_are_small(artifacts: Artifacts) -> None:
    """A package that comes in by accident shows here. Lambda itself takes 250 MB, and a cold start pays for each."""
    for name in FUNCTIONS:
        folders = [artifacts.function(name), *artifacts.layers(name)]
        assert sum(sizes.unpacked(folder) for folder in folders) < MOST_BYTES, name


def test_runtime_s_own_packages_are_not_in_a_layer(artifacts: Artifacts) -> None:
    """The SDK comes with Lambda's runtime: 25 MB that no archive carries."""
    packages = {path.name for path in (artifacts.layer("DependenciesLayer") / "python").iterdir()}
    assert packages.isdisjoint({"boto3", "botocore", "s3transfer"})


def test_charging_layer_is_the_package(artifacts: Artifacts) -> None:
    """The layer holds each file of the package, SQL included, and no other."""
    source = ROOT / "layers" / "charging" / "python"
    built = artifacts.layer("ChargingLayer") / "python"
    expected = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if shipped(path)}
    assert {path.relative_to(built): path.read_bytes() for path in built.rglob("*") if shipped(path)} == expected
    assert any(path.suffix == ".sql" for path in expected)


def test_schema_layer_is_the_migrations(artifacts: Artifacts) -> None:
    """The layer holds each migration, and not the generated picture of the schema."""
    expected = {path.name: path.read_bytes() for path in (ROOT / "schema").glob("[0-9]*.sql")}
    schema = artifacts.layer("SchemaLayer") / "python" / "schema"
    assert {path.name: path.read_bytes() for path in schema.iterdir()} == expected
    assert expected


def shipped(path: Path) -> bool:
    return path.is_file() and path.suffix != ".pyc"
