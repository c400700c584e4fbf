"""What a release ships: a wheel and an sdist that install, complete metadata, a README that PyPI can show, an
import that loads little, notebooks without noise, and benchmarks that run"""
import inspect,json,os,re,shutil,subprocess,sys,tarfile,zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path
import pytest,torch
from fastai.basics import Callback,Learner
from fastcore.docments import docments
import fastai_accum,fastai_accum.all as accum
from harness import SWEEP,simulated
from pasted import all_cells,notebooks

root = Path(__file__).resolve().parents[1]
cfg = ConfigParser(); cfg.read(root/'settings.ini', encoding='utf-8'); settings = cfg['DEFAULT']
def read(name): return (root/name).read_text(encoding='utf-8')

def sh(*args, **kwargs):
    return subprocess.run(list(map(str,args)), capture_output=True, text=True, check=True, **kwargs).stdout
def python(*args, cwd):
    "Run our Python, with the package that is tested, wherever it is"
    env = {**os.environ, 'PYTHONPATH':str(Path(fastai_accum.__file__).parents[1])}
    return sh(sys.executable, '-W', 'ignore', *args, cwd=cwd, env=env)
def build(*args): sh(sys.executable, '-m', 'build', '--no-isolation', *args)

@pytest.fixture(scope='module')
def src(tmp_path_factory):
    "The files of a clone, so that building leaves nothing in the tree"
    pytest.importorskip('build', reason='builds the release, and the package `build` is not installed')
    pytest.importorskip('setuptools', minversion='77',
                        reason='builds the release, and pyproject.toml asks for setuptools 77')
    src = tmp_path_factory.mktemp('src')/'fastai_accum'
    not_cloned = '.venv','.git','_docs','_proc','__pycache__','*.egg-info','build','dist','.hypothesis','.pytest_cache'
    return shutil.copytree(root, src, ignore=shutil.ignore_patterns(*not_cloned))

@pytest.fixture(scope='module')
def dist(src, tmp_path_factory):
    "The sdist, and the wheel that is built from it, as for a release"
    out = tmp_path_factory.mktemp('dist')
    build('--outdir', out, src)
    return out

def contents(folder):
    "The files of the wheel in `folder`"
    with zipfile.ZipFile(next(folder.glob('*.whl'))) as z: return {o: z.read(o).decode() for o in z.namelist()}

def test_wheel(dist, tmp_path):
    "Holds the package and the license and nothing else, and can be imported where it is installed"
    whl = next(dist.glob('*.whl'))
    assert whl.name.startswith(f'fastai_accum-{fastai_accum.__version__}-')
    files,info = contents(dist),f'fastai_accum-{fastai_accum.__version__}.dist-info'
    modules = {str(o.relative_to(root)) for o in (root/'fastai_accum').rglob('*.py')}
    assert {o for o in files if not o.startswith(info)}==modules
    assert files[f'{info}/licenses/LICENSE']==read('LICENSE')
    sh(sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--target', tmp_path/'site', whl)
    code = "import fastai_accum.all as m; assert 'site' in m.__file__, m.__file__; print(m.AccumulateStep(4).n_step)"
    assert sh(sys.executable, '-W', 'ignore', '-c', code, cwd=tmp_path,
              env={'PYTHONPATH':str(tmp_path/'site'), 'PATH':'', 'HOME':str(tmp_path)}).strip()=='4'

def test_sdist(dist, src, tmp_path):
    "Builds the same wheel as the clone, and has what a packager needs"
    sdist = next(dist.glob('*.tar.gz'))
    assert sdist.name==f'fastai_accum-{fastai_accum.__version__}.tar.gz'
    with tarfile.open(sdist) as t: names = {o.split('/', 1)[-1] for o in t.getnames()}
    assert {'LICENSE','README.md','CHANGELOG.md','pyproject.toml','settings.ini','setup.py'} <= names
    # a part of the tests would be of no use
    assert not any(o.startswith(('nbs','tests/','benchmarks')) for o in names)
    build('--wheel', '--outdir', tmp_path, src)
    assert contents(tmp_path)==contents(dist)

def test_twine(dist):
    pytest.importorskip('twine', reason='twine, which checks what PyPI accepts, is not installed')
    sh(sys.executable, '-m', 'twine', 'check', '--strict', *dist.iterdir())

def test_metadata(dist):
    meta = message_from_string(next(v for k,v in contents(dist).items() if k.endswith('METADATA')))
    for o in ('Name','Version','Summary','Author','Keywords','Requires-Python'): assert meta[o], f'{o} is missing'
    assert meta['License-Expression']=='Apache-2.0' and meta.get_all('License-File')==['LICENSE']
    assert meta['Description-Content-Type']=='text/markdown' and meta.get_payload().strip()==read('README.md').strip()
    assert [o for o in meta.get_all('Requires-Dist') if 'extra' not in o]==settings['requirements'].split()
    urls = dict(o.split(', ') for o in meta.get_all('Project-URL'))
    assert set(urls)=={'Homepage','Documentation','Repository','Issues','Changelog'}
    assert all(o.startswith('https://') for o in urls.values())
    trove = meta.get_all('Classifier')
    assert 'Operating System :: OS Independent' in trove
    assert not any(o.startswith('License') for o in trove)   # PyPI refuses them beside a license expression
    pythons = [o.split(' :: ')[-1] for o in trove if re.search(r':: 3\.\d+$', o)]
    tested = re.search(r'python: \[(.*)\]', read('.github/workflows/test.yml'))[1]
    assert pythons==re.findall(r"'(3\.\d+)'", tested), 'the workflow tests other versions of Python'
    assert meta['Requires-Python']==f'>={pythons[0]}'

def test_oldest():
    "The workflow's oldest versions are those that the metadata allows"
    assert set(settings['requirements'].replace('>=', '==').split()) <= set(read('.github/oldest.txt').split())

def test_readme_on_pypi():
    "PyPI and GitHub show the README without the site around it, so a link or an image that is relative would be broken"
    text = re.sub(r'^```.*?^```', '', read('README.md'), flags=re.S|re.M)
    links = re.findall(r'\]\(([^)\s]+)', text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    broken = [o for o in links if not o.startswith(('https://','#'))]
    assert links and not broken, broken
    files = [m[1] for o in links if (m := re.search(r'fastai_accum/(?:raw|blob)/main/(.*)', o))]
    assert files and all((root/o).is_file() for o in files), files

def test_pages_exist():
    "Links to the site that are not on the site, where its own test would see them"
    for name in 'README.md','CHANGELOG.md','.github/ISSUE_TEMPLATE/bug.yml','.github/ISSUE_TEMPLATE/config.yml':
        pages = re.findall(r'fastai-accum\.github\.io/fastai_accum/([\w/]+)\.html', read(name))
        missing = [o for o in pages if not (root/f'nbs/{o}.ipynb').is_file()]
        assert pages and not missing, (name, missing)

def test_changelog(): assert f'\n## {fastai_accum.__version__}\n' in read('CHANGELOG.md')

def test_import(tmp_path):
    """It loads no library that fastai and PyTorch's checkpoints have not loaded, and adds no bar to every learner. A
    name of `all` can be imported from the package, which loads nothing before; any other is missing as usual"""
    code = """import sys,fastai_accum
assert 'fastai' not in sys.modules
from fastai.basics import *
import torch.utils.checkpoint
modules,cbs = set(sys.modules),list(defaults.callbacks)
from fastai_accum import AccumulateStep, turn_on_accumulation, loop
import fastai_accum.all as all
assert AccumulateStep is all.AccumulateStep and not hasattr(fastai_accum, 'nn') and defaults.callbacks==cbs
try: from fastai_accum import AcumulateStep
except ImportError: print(*{o.split('.')[0] for o in set(sys.modules)-modules})"""
    assert python('-c', code, cwd=tmp_path)=='fastai_accum\n'

def test_public_names():
    names = {}
    exec('from fastai_accum.all import *', names)
    users = ('AccumulateStep MicroBatch turn_on_accumulation turn_off_accumulation accumulation loss_weight '
             'BatchNormEval')
    ours = 'Window Counts Plan WindowCallback Replaced join slices base_loss processes is_a fastai_accum F'
    assert {*users.split()} <= {*names} and not {*ours.split()} & {*names}

def test_names_of_callbacks():
    "`learn.NAME` is the callback, so no method of a learner may have that name"
    cbs = [o for o in map(vars(accum).get, accum.__all__) if isinstance(o, type) and issubclass(o, Callback)]
    assert len(cbs)>5
    for o in cbs:
        name = o.name if isinstance(o.name, str) else o.name.fget(o.__new__(o))
        assert not hasattr(Learner, name), f'{o.__name__} is learn.{name}, which is a method'

def test_help_explains_each_argument():
    "`help` and `?` show docstrings, so these have the comment of each argument, with its default"
    ours = [o for o in vars(Learner).values() if getattr(o, '__module__', '').startswith('fastai_accum')]
    n = 0
    for o in [*map(vars(accum).get, accum.__all__), *ours]:
        f = o.__init__ if isinstance(o, type) else o
        for k,v in docments(f, full=True).items():
            if k in ('self','return') or not v.docment: continue
            default = '' if v.default is inspect._empty else f'={v.default!r}'
            line = rf'^    \**{k}{re.escape(default)}: {re.escape(v.docment)}$'
            assert re.search(line, inspect.getdoc(o), flags=re.M), f'{o.__qualname__}: {k}'
            n += 1
    assert n>40, n

def first_example(folder, n_blocks, more=''):
    "A script of the first blocks of Python in the README, with small images, a small network and no weights to load"
    code = '\n'.join(re.findall(r'^```python\n(.*?)^```', read('README.md'), flags=re.S|re.M)[:n_blocks])
    small = {'resnet34':'resnet18, pretrained=False', 'Resize(224)':'Resize(32)', 'bs=64':'bs=16',
             'fine_tune(3)':'fine_tune(1)'}
    for old,new in small.items():
        assert old in code
        code = code.replace(old, new)
    images = """
from PIL import Image
path,shades = Path('images'),dict(dark=0, light=255)
for name,v in shades.items():
    (path/name).mkdir(parents=True)
    for i in range(48): Image.new('RGB', (32,32), (v,)*3).save(path/name/f'{i}.png')
"""
    head,body = code.replace('n_step=8', 'n_step=4').split('dls =', 1)
    (folder/'readme.py').write_text(head+images+'dls ='+body+more, encoding='utf-8')
    return folder/'readme.py'

def test_an_exported_learner_needs_no_package(tmp_path):
    "After each of our callbacks, it predicts the same in a process that cannot import it, and the learner trains on"
    head = """import sys
from fastai.basics import *
def dls():
    torch.manual_seed(0)
    xs = torch.randn(32, 6)
    dsets = Datasets(range(32), [[lambda i: xs[i]], [lambda i: tensor(i%3)]], splits=[range(32), range(32)])
    return dsets.dataloaders(bs=8, num_workers=0)
"""
    train = head+"""from fastai_accum.all import *
block = lambda: nn.Sequential(nn.Linear(6,6), nn.BatchNorm1d(6), nn.Tanh())
both = GradientCheckpointing(),OffloadActivations()
ours = (AccumulateStep(2),), (MicroBatch(4),), (MicroBatch(4, exact=True),), both, ()
for i,cbs in enumerate(ours):
    model = nn.Sequential(block(), block(), nn.Linear(6,3))
    learn = Learner(dls(), model, loss_func=CrossEntropyLossFlat(), cbs=cbs)
    if not cbs: turn_on_accumulation(2)   # the callback of the last fit stays on the learner
    for _ in range(2):
        with learn.no_logging(): learn.fit(1)
        was,attrs = [*learn.cbs],{k for k,v in vars(learn).items() if isinstance(v, Callback)}
        learn.export(f'{i}.pkl')
        assert was==[*learn.cbs] and all(o.learn is learn for o in was), was
        assert attrs=={k for k,v in vars(learn).items() if isinstance(v, Callback)}
    torch.save(learn.get_preds()[0], f'{i}.pth')"""
    load = head.replace('import sys', "import sys; sys.modules['fastai_accum'] = None")+"""
for i in range(5):
    learn = load_learner(f'{i}.pkl')
    preds = learn.get_preds(dl=dls().valid)[0]
    assert torch.allclose(preds, torch.load(f'{i}.pth'), atol=1e-6), i
print([o for o in sys.modules if o.startswith('fastai_accum')])"""
    python('-c', train, cwd=tmp_path)
    assert "['fastai_accum']" in python('-c', load, cwd=tmp_path)

def test_readme_runs(tmp_path):
    "The Python of the README, on images in a folder"
    counts = "\nlearn.fit(1)\nc = learn.accumulate_step.counts; print(c.n_micro, c.n_steps)"
    out = python(first_example(tmp_path, 2, counts), cwd=tmp_path)
    assert out.count('batch norm sees')==1 and 'batch norm sees 16 samples' in out, 'beside `AccumulateStep` only'
    answer = ' '.join(re.search(r'```text\n(.*?)```', read('README.md'), re.S)[1].split())   # of batches of 64
    for a,b in ('micro_batch(64','micro_batch(16'),('512','64'): answer = answer.replace(a, b)
    assert ' '.join(out.split()).count(answer)==2, 'the note, and the cause that is printed'
    assert 'cannot be combined' not in out and 'write `learn.gradient_checkpointing()`' not in out
    assert out.split()[-2:]==['4','1'], 'an epoch of 76 images in batches of 16: one step'

@pytest.mark.parametrize('version', ['3.11','3.12','3.13'])
def test_fresh_environment(version, dist, tmp_path):
    "The wheel, with what it requires, installs for each supported Python, and trains the first example of the README"
    if not os.environ.get('FRESH'): pytest.skip('it downloads PyTorch, 6 GB for each Python: `make test-fresh`')
    found = sorted((Path.home()/'.pyenv'/'versions').glob(f'{version}.*/bin/python'))   # the newest, by pyenv
    exe,bin = found[-1] if found else shutil.which(f'python{version}'),tmp_path/'env'/'bin'
    if not exe: pytest.skip(f'Python {version} is not installed')
    sh(exe, '-m', 'venv', tmp_path/'env')
    env = {k:v for k,v in os.environ.items() if k!='PYTHONPATH'}
    try: sh(bin/'pip', 'install', '--quiet', next(dist.glob('*.whl')), env=env)
    except subprocess.CalledProcessError as e:
        if not re.search('No matching distribution|connection|Temporary failure', e.stderr): raise
        pytest.skip(f'its packages cannot be downloaded here: {e.stderr.strip().splitlines()[-1]}')
    script = first_example(tmp_path, 1, "\nprint(sys.prefix, learn.cbs[-1], learn.final_record)")
    out = sh(bin/'python', '-W', 'ignore', script, cwd=tmp_path, env=env)
    assert f'{tmp_path/"env"} GradientCheckpointing' in out, out

# ---- notebooks

def lines_to_read(p):
    "The lines of code to be read: cells that are neither hidden nor exported, and blocks in the text"
    for c in all_cells(p):
        s = ''.join(c['source'])
        if c['cell_type']=='markdown':
            yield from '\n'.join(re.findall(r'^```.*?\n(.*?)^```', s, flags=re.S|re.M)).split('\n')
        elif not re.search(r"^#\|\s*(hide|export|exporti)\b", s, flags=re.M):
            yield from (o for o in s.split('\n') if not o.startswith('#|'))

def test_one_name():
    "No two pages share a name, so it is clear which one is meant"
    names = [p.stem for p in notebooks]
    assert len(names)>40 and len(set(names))==len(names), sorted(o for o in set(names) if names.count(o)>1)

def test_lines_fit():
    """A line of code that readers see has at most 88 letters, and on pages for users no comment behind it: on a phone,
    that is cut"""
    developers = read('nbs/_quarto.yml').partition('id: developers')[2]
    for p in notebooks:
        for o in lines_to_read(p):
            assert len(o)<=88, (p.stem, o)
            assert f'{p.stem}.ipynb' in developers or not re.search(r'\S\s+# ', o), (p.stem, o)

def test_no_noise_in_notebooks():
    "Stored outputs have no warnings, progress bars or paths of one machine"
    noise = 'Warning','█','% [','|----','site-packages',*(f'/{folder}/' for folder in ('home','root','tmp'))
    for p in notebooks:
        text = ''.join(str(o.get('text', '')) + str(o.get('data', {}).get('text/plain', ''))
                       for c in all_cells(p) for o in c.get('outputs', []))
        assert not [o for o in noise if o in text], p.stem

def test_readme_has_the_commands():
    text = read('README.md')
    assert 'git clone' in text and {'make demo','make test'}<=set(text.splitlines())

# ---- benchmarks

def test_what_the_gpu_runs():
    "Files and names of tests that exist"
    script = read('benchmarks/gpu.py')
    tests = {p.stem:p.read_text(encoding='utf-8') for p in (root/'tests').glob('test_*.py')}
    files,names = (re.search(o, script)[1] for o in (r"names = ('.+')", r"'-k', '(on_.+?)'"))
    assert {f'test_{o}' for o in re.findall(r'\w+', files)}<=tests.keys()
    assert not [o for o in names.split(' or ') if not re.search(rf'def test_\w*{o}', ''.join(tests.values()))]

expected = dict(tests='told', costs='step', exact='exact=True', limits='seconds', rooms='memory', profile='share')

@simulated
@pytest.mark.parametrize('part', [*expected] if SWEEP else ['exact','rooms'])   # the others at night
def test_a_part_of_the_bench_runs(part, fakegpu):
    "Of `make bench-gpu`, here on the simulated accelerator with tiny sizes: a card is rare"
    args = '-W', 'ignore', root/'benchmarks'/'gpu.py', '--dry', '--part', part
    res = subprocess.run([sys.executable, *args], capture_output=True, text=True)
    rows = [json.loads(o) for o in res.stdout.splitlines() if o.startswith('{"')]
    assert not res.returncode and any(o.get(expected[part]) is not None for o in rows), res.stderr[-2000:]
