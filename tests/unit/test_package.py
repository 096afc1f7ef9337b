"""`import millrace`: the public names, and the imports at each step."""

from __future__ import annotations

import subprocess
import sys

import pytest

import millrace


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_import_of_the_package_loads_no_library() -> None:
    heavy = {"pyarrow", "numpy", "fsspec", "lmdb", "obstore", "asyncio", "urllib3", "click"}
    assert run(f"import sys, millrace; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


@pytest.mark.parametrize(
    "before",
    [
        "import millrace",
        "import millrace.filesystem",
        "import millrace.filesystem.filesystem",
        "from millrace.filesystem.opens import OWN_SCHEME",
        "import fsspec; fsspec.get_filesystem_class('millrace')",
        "from millrace import MillraceFileSystem",
    ],
)
def test_filesystem_after_any_import_is_the_public_function(before: str) -> None:
    program = (
        f"{before}\n"
        "import millrace, pickle\n"
        "from millrace import filesystem\n"
        "from millrace.filesystem import filesystem as own\n"
        "assert millrace.filesystem is filesystem is own is pickle.loads(pickle.dumps(filesystem))\n"
        "print(filesystem.__name__, 'filesystem' in dir(millrace))"
    )
    assert run(program) == "filesystem True\n"


def test_function_that_uses_the_package_is_pickled_by_ray() -> None:
    # Ray pickles a function of the main program together with the modules that it uses.
    program = (
        "import millrace, pickle\n"
        "from ray import cloudpickle\n"
        "def read(): return millrace.filesystem('file').protocol[0]\n"
        "assert pickle.loads(pickle.dumps(millrace)) is millrace\n"
        "print(cloudpickle.loads(cloudpickle.dumps(read))())"
    )
    assert run(program) == "millrace\n"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'millrace' has no attribute 'file_system'"):
        _ = millrace.file_system  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="file_system"):
        exec("from millrace import file_system")


def test_cached_read_imports_no_module() -> None:
    program = (
        "import sys, tempfile, pathlib, millrace\n"
        "folder = pathlib.Path(tempfile.mkdtemp()); (folder / 'x').write_bytes(b'1')\n"
        "fs = millrace.filesystem('file', cache_dir=str(folder / 'cache'), min_free=0)\n"
        "fs.cat_file(str(folder / 'x'))\n"
        "before = set(sys.modules)\n"
        "assert fs.cat_file(str(folder / 'x')) == b'1'\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert run(program) == "[]\n"
