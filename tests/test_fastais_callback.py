"""Known errors of fastai's `GradientAccumulation`, each measured against the large batch, and the same run with
`AccumulateStep`.

Both halves matter: `AccumulateStep` has to agree with the large batch to `TOL`, and fastai's callback has to be off by
what is known, or the comparison could not have failed. Where the known error depends on the data, `KNOWN` holds what it
is on the data made here."""
import json,subprocess,sys
from importlib.util import find_spec
from functools import partial
import pytest
from harness import *
from fastai_accum.loss import *

KNOWN = partial(pytest.approx, rel=.02)

def learner(n, bs, cbs=None, y=None, loss=None, opt_func=SGD, **kwargs):
    kwargs.setdefault('shuffle', False)
    return make_learner(make_dls(n, bs, y=y, **kwargs), loss_func=loss, opt_func=opt_func, cbs=cbs)

def run(fit, *args, **kwargs):
    learn = learner(*args, **kwargs)
    fit(learn)
    return learn

def grad_error(a, b, step=0):
    """Relative error of the gradients that reached a step of `a`, against those of the same step of `b`; -1 is the
    last step"""
    cat = lambda learn: torch.cat([g.flatten() for g in learn.spy.steps[step]['grads']])
    return ((cat(a)-cat(b)).norm()/cat(b).norm()).item()

def once(learn): learn.fit(1)
theirs,ours = GradientAccumulation,AccumulateStep

@pytest.mark.parametrize('bs,n_acc,error', [(12,32,.125), (20,64,.25), (24,32,.5), (48,64,.5)])
def test_divides_by_what_it_saw(bs, n_acc, error):
    large = -(-n_acc//bs)*bs
    big = run(once, large, large)
    assert grad_error(run(once, large, bs, theirs(n_acc)), big) == pytest.approx(error)
    assert_same(run(once, large, bs, ours(n_samples=n_acc)), big)

@pytest.mark.parametrize('bs,n,factor', [(16,4,4), (64,4,16), (64,2,32)])
def test_window_below_the_batch(bs, n, factor):
    big = run(once, 2*bs, bs)
    assert grad_error(run(once, 2*bs, bs, theirs(n)), big) == pytest.approx(factor-1)
    with pytest.warns(UserWarning, match=f'{n} samples are fewer than the batch size {bs}'):
        learn = run(once, 2*bs, bs, ours(n_samples=n))
    assert_same(learn, big)

@pytest.mark.filterwarnings('ignore:AccumulateStep')
@pytest.mark.parametrize('n,steps', [(80,1), (48,0)])
def test_every_sample_reaches_a_step(n, steps):
    big = run(once, n, 64)
    assert len(run(once, n, 8, theirs(64)).spy.steps)==steps
    learn = run(once, n, 8, ours(n_samples=64))
    assert_same(learn, big)
    assert learn.accumulate_step.counts.n_stepped==n

def left_over(cb, then, n=80, large=64, **kwargs):
    "Run `then` after a fit that `cb` ends with gradients left over, and run the same with the large batch"
    a,b = learner(n, 8, cb, **kwargs),learner(n, large, **kwargs)
    for l in (a,b):
        l.fit(1)
        b.model.load_state_dict(a.model.state_dict())   # the comparison is of what follows, from the same weights
        l.spy.steps = []
    for l in (a,b): then(l)
    return a,b

thens = dict(
    fit       = lambda l: l.fit(1),
    reset_opt = lambda l: l.fit(1, reset_opt=True),
    lr_find   = lambda l: l.lr_find(num_it=8, show_plot=False, suggest_funcs=None),
)
@each(then=thens)
def test_nothing_is_left_over(then, tmp_path):
    def go(l): l.path = tmp_path; thens[then](l)
    assert grad_error(*left_over(theirs(64), go)) == KNOWN(.3205)
    a,b = left_over(ours(n_step=8), go)
    assert grad_error(a, b) <= TOL

def test_nothing_is_left_over_when_removed():
    def go(cls): return lambda l: l.remove_cb(cls) and l.fit(1)
    def error(cb):
        a = learner(80, 8, cb); a.fit(1)
        b = learner(80, 8); b.model.load_state_dict(a.model.state_dict())
        a.remove_cb(type(cb)); a.spy.steps = []
        a.fit(1); b.fit(1)
        return grad_error(a, b)
    assert error(theirs(64)) == KNOWN(.1897)
    assert error(ours(n_step=8)) <= TOL

def test_frozen_weights_stay():
    def moved(cb):
        learn = learner(80, 8, cb)
        learn.fit(1)
        learn.freeze()
        old = [p.clone() for p in learn.model[0].parameters()]
        learn.fit(1, wd=0.)
        return max(((p-o).norm()/o.norm()).item() for p,o in zip(learn.model[0].parameters(), old))
    assert moved(theirs(64)) == KNOWN(.00117)
    assert moved(ours(n_step=8)) == 0

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
    minority     = (1.262, nn.CrossEntropyLoss(weight=torch.tensor([1.,10.,1.]).double()), rare(32)),
    inverse      = (.8718, nn.CrossEntropyLoss(weight=1/rare(32).bincount(minlength=3).clamp(1).double()), rare(32)),
    texts        = (.2564, nn.CrossEntropyLoss(), texts(32, 12, False), 12),
    sorted_texts = (.8892, nn.CrossEntropyLoss(), texts(32, 12, True), 12),
    void_pixels  = (.4788, nn.CrossEntropyLoss(ignore_index=255), void(32), 16),
    kept_sum     = (.75,   DiceLoss(), classes(32*16).reshape(32,4,4), 16),
)
@pytest.mark.parametrize('name', losses)
def test_uneven_weights(name):
    error,loss,y,*n = losses[name]
    class Map(PerToken):
        def forward(self, x): return super().forward(x).reshape(-1,3,4,4)
    def train(bs, cb=None):
        learn = learner(32, bs, cb, y=y, loss=loss)
        if n: learn.model = (Map if y.ndim==3 else PerToken)(*n); learn.splitter = trainable_params
        learn.fit(1)
        return learn
    big,tol = train(32),1e-5 if name=='kept_sum' else TOL    # DiceLoss computes in float32
    assert grad_error(train(8, theirs(32)), big) == KNOWN(error)
    assert_same(train(8, ours(n_step=4)), big, tol)

def test_sum_reduction():
    "The sum of a mean loss is divided by the weight; fastai's divides by the window, of sums"
    mean,total = nn.CrossEntropyLoss(),nn.CrossEntropyLoss(reduction='sum')
    big = run(once, 32, 32, loss=total)
    assert grad_error(run(once, 32, 8, theirs(32), loss=total), big) == pytest.approx(.75)
    assert_same(run(once, 32, 8, ours(4, average=False), loss=total), big)
    with pytest.warns(UserWarning, match="reduction='sum'"): learn = run(once, 32, 8, ours(4), loss=total)
    assert grad_error(learn, run(once, 32, 32, loss=mean)) <= TOL

def test_short_batch_of_a_language_model():
    "A stream of text, cut into 72 + 72 + 72 + 9 tokens. The reference is a loop written by hand"
    x,y = features(2*225).reshape(2,225,6),classes(2*225).reshape(2,225)
    batches = [(x[:,i:i+72], y[:,i:i+72]) for i in range(0,225,72)]
    loss = lambda pred,targ: F.cross_entropy(pred.flatten(0,1), targ.flatten())
    def train(cb):
        learn = make_learner(make_dls(32, 8), loss_func=loss, opt_func=SGD, cbs=cb)
        learn.dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))
        learn.fit(1)
        return learn
    model = small_model()
    F.cross_entropy(model(x.flatten(0,1)), y.flatten()).backward()
    ref = [p.grad for p in model.parameters()]
    err = lambda l: rel(l.spy.steps[0]['grads'], ref)[0]
    assert err(train(theirs(8))) == KNOWN(1.0202)
    assert err(train(ours(4, weight=lambda pred,targ: targ.numel()))) <= TOL

def test_all_targets_ignored():
    y = classes(64); y[8:16] = -100
    assert any(math.isnan(o) for o in run(once, 64, 8, theirs(32), y=y).recorder.losses)
    learn = run(once, 64, 8, ours(4), y=y)
    assert not any(math.isnan(o) for o in learn.recorder.losses)
    assert_same(learn, run(once, 64, 32, y=y))

def test_loss_is_not_edited_in_place():
    for f in torch.sqrt, torch.exp, torch.sigmoid, torch.linalg.vector_norm:
        loss = lambda pred,targ: f(F.cross_entropy(pred, targ))
        with pytest.raises(RuntimeError, match='modified by an inplace'): run(once, 32, 8, theirs(16), loss=loss)
        run(once, 32, 8, ours(2), loss=loss)

def test_schedule_of_one_cycle():
    "One-cycle over 8 windows of 4: fastai's takes its steps at the last quarter of each point of the schedule"
    fit = lambda l: l.fit_one_cycle(1, 0.1)
    lrs = lambda l: [s['hypers'][-1]['lr'] for s in l.spy.steps]
    big,a,t = (run(fit, 256, bs, cb) for bs,cb in ((32,None), (8,ours(4)), (8,theirs(32))))
    assert lrs(a)==lrs(big)
    assert lrs(t)[0]/lrs(big)[0] == KNOWN(8.4) and lrs(t)[-1]/lrs(big)[-1] == KNOWN(.064)

def test_lr_find_counts_steps(tmp_path):
    def find(bs, cb=None):
        learn = learner(80, bs, cb); learn.path = tmp_path
        learn.lr_find(num_it=40, show_plot=False, suggest_funcs=None, stop_div=False)
        return learn
    big,a,t = find(32),find(8, ours(4)),find(8, theirs(32))
    assert len(t.spy.steps) == 10
    assert a.recorder.lrs==big.recorder.lrs and len(a.recorder.lrs)==len(a.spy.steps)==40
    close(a.recorder.losses[:32], big.recorder.losses[:32])
    close(a.recorder.losses, big.recorder.losses, 1e-8)

root = Path(__file__).resolve().parents[1]
@pytest.fixture
def errors(monkeypatch):
    monkeypatch.syspath_prepend(root/'benchmarks')
    import errors
    return errors

def test_error_table(errors):
    """The table of the page "Compared" is what `benchmarks/errors.py` measures, and every figure of `AccumulateStep`
    is right"""
    saved = json.loads((root/'benchmarks'/'results'/'errors.json').read_text(encoding='utf-8'))
    right = {'A fit ends with a smaller window':'0.00%', '80 samples':'0%', '48 samples':'0%', '64 samples':'0%',
             'Is the learning rate':'right',
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
