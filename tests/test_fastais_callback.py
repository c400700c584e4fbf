"""What is known of fastai's `GradientAccumulation`, fastxtend's and ours: the table of the page "Compared" is what
`benchmarks/errors.py` measures, on the learners and losses that are made here"""
import json,subprocess,sys
from importlib.util import find_spec
from harness import *

def learner(n, bs, cbs=None, y=None, loss=None, opt_func=SGD, shuffle=False, **kwargs):
    return make_learner(make_dls(n, bs, y=y, shuffle=shuffle, **kwargs), loss_func=loss, opt_func=opt_func, cbs=cbs)

def run(fit, *args, **kwargs):
    learn = learner(*args, **kwargs)
    fit(learn)
    return learn

def grad_error(a, b, step=0):
    """Relative error of the gradients that reached a step of `a`, against those of the same step of `b`; -1 is the
    last step"""
    a,b = (torch.cat([g.flatten() for g in l.spy.steps[step]['grads']]) for l in (a,b))
    return ((a-b).norm()/b.norm()).item()

def once(learn): learn.fit(1)

def rare(n): y = torch.zeros(n).long(); y[:n//6] = 1; return y
def texts(n, n_tok, sort):
    "Texts of 1 to `n_tok` tokens, padded with a class that is ignored"
    lens = (torch.rand(n, generator=torch.Generator().manual_seed(1))**3*n_tok).ceil()
    lens = lens.sort().values if sort else lens
    return torch.where(torch.arange(n_tok)<lens[:,None], classes(n*n_tok).reshape(n, n_tok), -100)
def void(n):
    return torch.where(torch.rand(n, 16, generator=torch.Generator().manual_seed(1))<torch.linspace(0,.9,n)[:,None],
                       255, classes(n*16).reshape(n,16))

class PerToken(nn.Module):
    "Logits of 3 classes at each of `n` places"
    def __init__(self, n): super().__init__(); torch.manual_seed(0); self.n,self.lin = n,nn.Linear(6,3*n).double()
    def forward(self, x): return self.lin(x).reshape(-1,3,self.n)

losses = dict(
    minority     = (nn.CrossEntropyLoss(weight=torch.tensor([1.,10.,1.]).double()), rare(32)),
    inverse      = (nn.CrossEntropyLoss(weight=1/rare(32).bincount(minlength=3).clamp(1).double()), rare(32)),
    texts        = (nn.CrossEntropyLoss(), texts(32, 12, False), 12),
    sorted_texts = (nn.CrossEntropyLoss(), texts(32, 12, True), 12),
    void_pixels  = (nn.CrossEntropyLoss(ignore_index=255), void(32), 16),
    kept_sum     = (DiceLoss(), classes(32*16).reshape(32,4,4), 16),
)

root = Path(__file__).resolve().parents[1]

def test_error_table(monkeypatch):
    """The table of the page "Compared" is what `benchmarks/errors.py` measures, and every figure of `AccumulateStep`
    is right"""
    monkeypatch.syspath_prepend(root/'benchmarks')
    import errors
    saved = json.loads((root/'benchmarks'/'results'/'errors.json').read_text(encoding='utf-8'))
    loader = 'samples, windows of 64, a loader with `drop_last='
    right = {f'80 {loader}False':'0%', f'80 {loader}True':'20%', f'48 {loader}False':'0%',
             f'48 {loader}True':'raises ValueError',
             '64 samples':'0%', 'A fit ends with a smaller window':'0.00%', 'Is the learning rate':'right',
             'How many steps does':'100', 'The loss ends in':'trains on its mean', 'A fit is cancelled':'5 of 5'}
    def same(a, b):
        try: return float(a)==pytest.approx(float(b), rel=.05, abs=TOL, nan_ok=True)
        except ValueError: return a==b
    for row,old in zip(errors.table_rows(), saved['rows'], strict=True):
        assert all(map(same, row, old)), f'measured {row}, saved {old}'
        figure = next((v for k,v in right.items() if row[0].startswith(k)), None)
        assert row[4]==figure if figure else float(row[4])<=TOL, row

@pytest.mark.skipif(not find_spec('fastxtend'),
                    reason='compares with fastxtend, which is not installed: it is in the extra "integrations"')
def test_fastxtend_rules():
    """The rules of fastxtend that the table uses have the errors of fastxtend itself. It runs in its own process,
    since fastxtend adds a callback to every learner"""
    res = subprocess.run([sys.executable, '-W', 'ignore', root/'benchmarks'/'errors.py', '--fastxtend'],
                         capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr
