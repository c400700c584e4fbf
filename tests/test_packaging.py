"What is shipped: a wheel and an sdist that install, one version, one list of requirements, and an import that costs little"
import subprocess,sys,tarfile,tomllib,zipfile
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent

def sh(*args, **kwargs): return subprocess.run(list(map(str,args)), capture_output=True, text=True, check=True, **kwargs).stdout

@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    "The wheel, built from the sdist, as a release builds it"
    import shutil
    src,out = tmp_path_factory.mktemp('src')/'fastai_accum',tmp_path_factory.mktemp('dist')
    shutil.copytree(root, src, ignore=shutil.ignore_patterns('.venv','.git','_*','*.egg-info','build','dist','.hypothesis','.pytest_cache'))
    shutil.copytree(root/'fastai_accum', src/'fastai_accum', dirs_exist_ok=True, ignore=shutil.ignore_patterns('__pycache__'))
    subprocess.run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, src], check=True, capture_output=True)
    return out

def test_wheel_and_sdist(dist, tmp_path):
    import fastai_accum
    whl,sdist = next(dist.glob('*.whl')),next(dist.glob('*.tar.gz'))
    assert whl.name.startswith(f'fastai_accum-{fastai_accum.__version__}-') and sdist.name==f'fastai_accum-{fastai_accum.__version__}.tar.gz'
    names = set(zipfile.ZipFile(whl).namelist())
    assert {f'fastai_accum/{o.name}' for o in (root/'fastai_accum').glob('*.py')} <= names
    assert not any(o.startswith(('nbs','tests','benchmarks')) for o in names)
    assert any(o.name.endswith('/settings.ini') for o in tarfile.open(sdist))
    meta = next(zipfile.ZipFile(whl).read(o).decode() for o in names if o.endswith('METADATA'))
    assert [o for o in meta.splitlines() if o.startswith('Requires-Dist') and 'extra' not in o]==['Requires-Dist: fastai>=2.7.6']
    sh(sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--target', tmp_path/'site', whl)
    code = "import fastai_accum.all as m; assert 'site' in m.__file__, m.__file__; print(m.AccumulateStep(4).n_step)"
    assert sh(sys.executable, '-W', 'ignore', '-c', code, cwd=tmp_path, env={'PYTHONPATH':str(tmp_path/'site'), 'PATH':'', 'HOME':str(tmp_path)}).strip()=='4'

def test_stated_once():
    proj = tomllib.loads((root/'pyproject.toml').read_text())['project']
    assert set(proj['dynamic'])=={'version','dependencies','optional-dependencies'} and 'version' not in proj and 'dependencies' not in proj
    assert 'fastai' not in (root/'setup.py').read_text().replace('fastai_accum','') and 'version' not in (root/'settings.ini').read_text()

def test_import_time():
    "At most 50 ms on top of `import fastai.basics`: the best of five, since a busy machine only ever adds"
    code = 'import time, fastai.basics; t=time.perf_counter(); import fastai_accum.all; print(time.perf_counter()-t)'
    secs = min(float(sh(sys.executable, '-W', 'ignore', '-c', code, cwd=root)) for _ in range(5))
    assert secs<0.05, f'{secs*1000:.0f} ms'

def test_public_names():
    import fastai_accum.all as m
    for o in 'AccumulateStep Window Counts loss_weight loss_reduction base_loss sums_by_nature'.split(): assert hasattr(m, o), o

def test_one_way_imports():
    "`loss` knows nothing of `core`"
    assert 'fastai_accum' not in (root/'fastai_accum'/'loss.py').read_text().split('__all__')[1].replace('fastai_accum/loss','')
