"""The folder `kernels/` must not shadow the package `kernels` that transformers imports: in a
wheel, editable, and from the checkout, each with and without that package installed."""

import ast
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CHECK = """
import importlib.util, sys
from pathlib import Path
root, kind, with_kernels = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
import transformers
from transformers.utils import is_kernels_available
import transformers.integrations.hub_kernels
import anchor_cache
import anchor_cache.kernels.reference as reference
import anchor_cache.patches.attention as attention
from anchor_cache import AnchorDynamicCache, BlendedCache

home = Path(anchor_cache.__file__).resolve().parent
assert (home == root / "anchor_cache") == (kind != "wheel"), home
expected = home if kind == "wheel" else root
assert Path(reference.__file__).resolve().parent == expected / "kernels", reference.__file__
assert (expected / "kernels" / "csrc" / "native.c").is_file()
assert Path(attention.__file__).resolve().parent == expected / "patches", attention.__file__
spec = importlib.util.find_spec("kernels")
if with_kernels:
    assert "site-packages" in spec.origin, spec
    assert is_kernels_available(), "transformers does not see the kernels package"
    import kernels
    assert kernels.get_kernel
else:
    assert not is_kernels_available()
print("fine")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip(None, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


def pip(python, *arguments):
    target = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *target]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("kind", ["wheel", "editable", "checkout"])
def test_kernels_folder_shadows_nothing(kind, with_kernels, tmp_path, request):
    home = tmp_path / "venv"
    venv.EnvBuilder(with_pip=False).create(home)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    # Torch and transformers are those of this environment; what it has of ours is not seen.
    (site / "borrowed.pth").write_text(without_kernels(tmp_path))
    if kind == "wheel":
        pip(python, "install", "--no-deps", str(request.getfixturevalue("wheel")))
    elif kind == "editable":
        pip(python, "install", "--no-deps", "--editable", str(ROOT))
    if with_kernels:
        pip(python, "install", "--no-deps", "kernels")
        accept_version(site)
    for arguments in (["-c", CHECK], ["-m", "check"]):
        (tmp_path / "check.py").write_text(CHECK)
        cwd = ROOT if kind == "checkout" else tmp_path
        if arguments[0] == "-m" and kind == "checkout":
            continue
        result = subprocess.run(
            [str(python), *arguments, str(ROOT), kind, str(with_kernels)],
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0 and "fine" in result.stdout, result.stderr


def accept_version(site):
    """Make transformers import the installed kernels package: what this Python gets from the
    registry can be older than the range that this transformers looks at."""
    from packaging.version import parse
    from transformers.utils import import_utils

    oldest = getattr(import_utils, "KERNELS_MIN_VERSION", "0")
    (metadata,) = site.glob("kernels-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    (i,) = (i for i, line in enumerate(lines) if line.startswith("Version: "))
    if parse(lines[i].split()[1]) < parse(oldest):
        lines[i] = f"Version: {oldest}"
        metadata.write_text("\n".join(lines))


def without_kernels(tmp_path):
    """A folder of links to this environment's packages, the one in question left out."""
    links = tmp_path / "packages"
    links.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("kernels", "__editable__", "anchor_cache")):
            (links / entry.name).symlink_to(entry)
    return str(links)


def test_kernels_and_patches_have_no_init():
    for folder in ("kernels", "patches"):
        assert not (ROOT / folder / "__init__.py").exists()


LAYERS = {"kernels": 0, "patches": 1, "anchor_cache": 2, "examples": 3, "tests": 3}


@pytest.mark.parametrize("folder", ["kernels", "patches", "anchor_cache"])
def test_imports_point_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [module]
                if node.level == 1 and folder == "anchor_cache":
                    names = [module if module.split(".")[0] in LAYERS else "anchor_cache"]
                elif node.level:
                    names = [folder] if node.level == 1 else [module]
            for name in names:
                top = name.removeprefix("anchor_cache.").split(".")[0]
                assert LAYERS.get(top, 0) <= LAYERS[folder], f"{path}: {name}"


def test_kernels_import_only_torch_and_triton():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in allowed


def test_import_has_no_side_effects():
    script = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as F\n"
        "before = dict(F)\nimport anchor_cache\nassert dict(F) == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
