"""How large and how dense the code is, and how far a window travels through it.

    python benchmarks/size.py    # lines of each module, what makes them hard to read, words of the notebooks, and the calls and moves in one window of four

A line counts if it is neither blank nor a comment. Hard to read are conditional expressions inside of others, assignments of several values to several
names, lines over 100 characters, and cells of the notebooks with more than 60 lines of code. A call is one of a Python function of the package or of `fastai.learner`, counted with
`sys.setprofile` over one window of four micro-batches; a move is a call in another module than the call before."""
import ast,json,sys,warnings
from collections import Counter
from pathlib import Path
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai import basics
from fastai_accum import private
from fastai_accum.core import AccumulateStep

root  = Path(__file__).resolve().parent.parent/'fastai_accum'
promise = 'core loop windows loss processes refusals replace patch microbatch cutting slices modes turns state'.split()

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
