"""The cells of a page that a reader sees, pasted one after the other into an empty notebook.

The notebook lies in an empty folder. It can import the package and what is installed, nothing else of this project."""
import json,os,re,subprocess,sys
import pytest
from pathlib import Path
import fastai_accum

NBS = Path(__file__).resolve().parent.parent/'nbs'
HIDDEN = {'hide','export','exporti','exports','default_exp'}   # nbdev leaves these out, or shows documentation instead

def is_visible(source):
    "Whether the page shows the code of a cell, for a reader to copy"
    directives = dict(re.findall(r'^#\|\s*(\w[\w-]*):?[ \t]*(.*)$', source, flags=re.M))
    unseen = HIDDEN.intersection(directives) or 'false' in (directives.get('echo'), directives.get('include'))
    return not unseen and not source.startswith('show_doc(')

def all_cells(path): return json.loads(path.read_text(encoding='utf-8'))['cells']

def cells(path):
    "What a reader copies from page `path`: all of a lesson or how-to, half of another page"
    found = all_cells(path)
    n = len(found) if path.parent.name in ('tutorials','howto') else (len(found)+1)//2
    sources = [''.join(c['source']) for c in found[:n] if c['cell_type']=='code']
    return [o for o in sources if o and is_visible(o)]

NOTEBOOK = '''
import json,sys
from execnb.shell import CaptureShell
shell = CaptureShell()
for source in json.load(sys.stdin):
    shell.run(source)
    if shell.exc: sys.exit(f"{source}\\n\\n{type(shell.exc).__name__}: {shell.exc}")
'''

def paste(sources, folder):
    "Run `sources` in a new notebook in the empty `folder`: the first cell that fails and its error, or nothing"
    pytest.importorskip('execnb', reason='nbdev, which runs notebooks, needs a newer fastcore')
    for o in (site := folder/'site'),(empty := folder/'empty'): o.mkdir(parents=True)
    (site/'fastai_accum').symlink_to(Path(fastai_accum.__file__).parent)
    env = os.environ | dict(PYTHONPATH=str(site), PYTHONWARNINGS='ignore', MPLBACKEND='agg')
    res = subprocess.run([sys.executable, '-c', NOTEBOOK], input=json.dumps(sources), cwd=empty, env=env,
                         capture_output=True, text=True)
    return res.stderr if res.returncode else ''

notebooks = [p for p in sorted(NBS.rglob('*.ipynb'))
             if not any(o.startswith(('.','_')) for o in p.relative_to(NBS).parts)]
pages = {p.relative_to(NBS).with_suffix('').as_posix(): p for p in notebooks if cells(p)}

def recipe(page, name):
    "The class or function `name` that `page` defines for its readers"
    start,names = re.compile(rf'^(class|def) {name}\b', re.M),{}
    sources = [''.join(c['source']) for c in all_cells(NBS/page)]
    code, = [o[m.start():].split('\n\n')[0] for o in sources if (m := start.search(o))]
    exec('from fastai.basics import *\n'+code, names)
    return names[name]
