"""How large the code is, and how far a window travels through it.

    python benchmarks/size.py    # lines and statements of each module; calls and moves in one window of four

A line counts if it is neither blank nor a comment. A call is one of a Python function of the package or of `fastai.learner`, counted with
`sys.setprofile` over one window of four micro-batches; a move is a call in another module than the call before."""
import ast,sys,warnings
from collections import Counter
from pathlib import Path
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai_accum.core import AccumulateStep

root  = Path(__file__).resolve().parent.parent/'fastai_accum'
promise = 'core microbatch windows replace processes turns refusals slices state patch'.split()

def size(f):
    "Lines and statements of a module, and its longest line"
    lines = [o for o in f.read_text().splitlines() if o.strip() and not o.strip().startswith('#')]
    return len(lines),sum(isinstance(o, ast.stmt) for o in ast.walk(ast.parse(f.read_text()))),max(map(len, lines), default=0)

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
    print(table(rows, ['module','lines','statements','longest line']))
    n = {Path(r[0]).stem:r[1] for r in rows}
    print(f'\nthe promise ({", ".join(promise)}): {sum(map(n.get, promise))} lines; all modules: {sum(n.values())}')
    calls = [['a window of four', *window(AccumulateStep(4))], ["four batches of fastai's", *window([], 4)]]
    print('\n'+table(calls, ['','calls','moves']))
