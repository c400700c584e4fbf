"""How large and how dense the code is, and how far a window travels through it.

    python benchmarks/size.py    # lines of each module, what makes them hard to read, words of the notebooks, imports, calls, and the walk of a fit

A line counts if it is neither blank nor a comment. Hard to read are conditional expressions inside of others, assignments of several values to several
names, lines over 100 characters, and cells of the notebooks with more than 60 lines of code. A call is one of a Python function of the package or of `fastai.learner`, counted with
`sys.setprofile` over one window of four micro-batches; a move is a call in another module than the call before. The walk is what runs from `fit` to
the first step of `MicroBatch(8, exact=True)`, and in the second batch. An import goes up if it takes from a building that stands later in `buildings`."""
import ast,json,sys,threading,warnings
from collections import Counter
from pathlib import Path
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai import basics
from fastai_accum import private
from fastai_accum.all import *

root  = Path(__file__).resolve().parent.parent/'fastai_accum'
promise = 'core loop windows loss processes refusals microbatch slices turns state'.split()
buildings = 'private slices devices state modes', 'loss windows refusals processes loop', 'turns proof', 'memory', 'exact', 'microbatch core extras', 'know', 'all'

def is_code(line): return line.strip() and not line.strip().startswith('#')

def size(f):
    "Lines of a module, and how many of its places are hard to read"
    text = f.read_text(encoding='utf-8')
    lines,nodes = list(filter(is_code, text.splitlines())),list(ast.walk(ast.parse(text)))
    ifs = [o for o in nodes if isinstance(o, ast.IfExp)]
    nested = sum(isinstance(c, ast.IfExp) for o in ifs for c in ast.walk(o) if c is not o)
    several = [o for o in nodes if isinstance(o, ast.Assign) and isinstance(o.value, ast.Tuple) and isinstance(o.targets[0], ast.Tuple)]
    cells = [len(list(filter(is_code, o.splitlines()))) for o in text.split('\n# %% ')[1:]]
    return len(lines),nested,len(several),sum(len(o)>100 for o in lines),sum(n>60 for n in cells)

class Mark(Callback):
    "Notes where each window ends in `log`"
    order,run_valid = 1e9,False
    def __init__(self, log): self.log,self.at = log,[]
    def after_batch(self): self.at.append(len(self.log))
    def before_validate(self): raise CancelValidException

def window(cbs, n_batches=1):
    "The modules whose functions are called in the second `n_batches` batches of the learner"
    log = []
    def note(frame, event, arg):
        name = frame.f_globals.get('__name__', '')
        if event=='call' and (name.startswith('fastai_accum') or name=='fastai.learner'): log.append(name)
    batches = [(torch.randn(8,6),torch.randint(3,(8,))) for _ in range(12)]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))
    mark = Mark(log)
    learn = Learner(dls, nn.Linear(6,3), loss_func=nn.CrossEntropyLoss(), cbs=[*L(cbs), mark])
    learn.logger = noop
    sys.setprofile(note)
    try: learn.fit(1)
    finally: sys.setprofile(None)
    part = log[mark.at[0]:mark.at[n_batches]]
    return len(part),sum(a!=b for a,b in zip(part, part[1:]))

class Steps(Callback):
    "Notes how long `log` is after each step"
    order = 1e9
    def __init__(self, log): self.log,self.at = log,[]
    def after_step(self): self.at.append(len(self.log))

def walk():
    "The modules and the functions that run up to the first step of `MicroBatch(8, exact=True)`, and in the second batch"
    log,data = [],[(torch.randn(6),i%3) for i in range(64)]
    def note(frame, event, arg):
        name = frame.f_globals.get('__name__', '')
        if event=='call' and name.startswith('fastai_accum'): log.append((name,frame.f_code.co_qualname))
    steps,model = Steps(log),nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8,3))
    learn = Learner(DataLoaders.from_dsets(data, data, bs=16), model, loss_func=nn.CrossEntropyLoss(), cbs=[MicroBatch(8, exact=True), steps])
    learn.logger = noop
    for o in threading,sys: o.setprofile(note)
    try:
        with redirect_stdout(None): learn.fit(1)
    finally:
        for o in sys,threading: o.setprofile(None)
    parts = log[:steps.at[0]],log[steps.at[0]:steps.at[1]]
    return [(len({m for m,_ in o}), len(set(o))) for o in parts]

def imports():
    "The imports of modules by modules, and those of them that go up"
    of = {o:i for i,names in enumerate(buildings) for o in names.split()}
    names = [f.relative_to(root).with_suffix('').parts for f in root.rglob('*.py') if f.stem not in ('__init__','_modidx')]
    found = []
    for parts in names:
        nodes = ast.walk(ast.parse((root/Path(*parts)).with_suffix('.py').read_text(encoding='utf-8')))
        for o in nodes:
            if not isinstance(o, ast.ImportFrom) or not o.level: continue
            found.append((parts[0], (*parts[:-o.level], *(o.module or '').split('.'))[0]))
    return found,[o for o in found if of[o[1]]>of[o[0]]]

if __name__=='__main__':
    rows = [[str(f.relative_to(root)), *size(f)] for f in sorted(root.rglob('*.py')) if f.stem not in ('__init__','_modidx')]
    n,nested,several,long,cells = [sum(o) for o in list(zip(*rows))[1:]]
    rows.append(['all modules', n, nested, f'{several}: {100*several/n:.1f} in 100 lines', f'{long}: {100*long/n:.0f} %', cells])
    print(table(rows, ['module','lines','nested conditionals','assignments of several values','lines over 100 characters','cells over 60 lines']))
    used = [k for k,v in vars(private).items() if not k.startswith('_') and not hasattr(basics, k)]
    print(f'\nprivate names of PyTorch and fastai that private.py gives to the others: {len(used)}')
    of = {Path(r[0]).stem:r[1] for r in rows}
    print(f'\nthe promise ({", ".join(promise)}): {sum(map(of.get, promise))} lines')
    texts = [c for f in root.parent.glob('nbs/**/*.ipynb') for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='markdown']
    print(f"\nthe notebooks: {sum(len(''.join(c['source']).split()) for c in texts):,} words of prose")
    calls = [['a window of four', *window(AccumulateStep(4))], ["four batches of fastai's", *window([], 4)]]
    print('\n'+table(calls, ['','calls','moves']))
    (n,m),(k,j) = walk()
    print(f'\nMicroBatch(8, exact=True): {n} modules and {m} functions from fit to the first step, {k} and {j} in the second batch')
    found,up = imports()
    print(f'\nimports of modules by modules: {len(found)}, up: {len(up)} {up or ""}')
