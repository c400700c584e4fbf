"""Memory and passes: one pass over the gradients a window at most, no copy of them, no synchronisation with the
device inside a window"""
import gc,weakref
import pytest
from functools import partial
from harness import *
from fastai_accum import loop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'benchmarks'))
from common import peak_bytes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='trains on a GPU, and this machine has none')

def conv_learner(cbs=None, opt_func=SGD, bs=8, n=64, device='cpu'):
    x,y = torch.randn(n,3,16,16),torch.randint(10,(n,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3,32,3), nn.ReLU(), nn.Conv2d(32,32,3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(32,10)).to(device)
    batches = [(x[i:i+bs].to(device),y[i:i+bs].to(device)) for i in range(0,n,bs)]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None), device=torch.device(device))
    learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, cbs=cbs)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

# optimizer, and whether its `zero_grad` frees the gradients
opts = dict(sgd=(partial(SGD, mom=.9), False), adam=(Adam, False),
            torch_sgd=(partial(OptimWrapper, opt=torch.optim.SGD), True),
            torch_adamw=(partial(OptimWrapper, opt=torch.optim.AdamW), True))

@pytest.mark.parametrize('opt', opts)
def test_peak_memory(opt):
    """Peak memory of an epoch: that of a plain run at the micro-batch size, or for optimizers that free their
    gradients that of fastai's callback"""
    f,frees = opts[opt]
    def peak(cb=None):
        learn = conv_learner(cb, f); learn.fit(1)
        return peak_bytes(partial(learn.fit, 1))
    ours = peak(AccumulateStep(4))
    theirs = peak(GradientAccumulation(32)) if frees else peak()
    assert ours <= 1.01*theirs, (ours, theirs)

def test_passes_over_gradients(monkeypatch):
    "None for windows that hold what is expected, one for others"
    calls = []
    mul = loop.multiply
    monkeypatch.setattr(loop, 'multiply', lambda ts,o: (calls.append(len(ts)), mul(ts,o)))
    def fit(n, **kw):
        calls.clear()
        make_learner(make_dls(n, 8), cbs=AccumulateStep(4), opt_func=SGD, **kw).fit(1)
        return list(calls)
    assert fit(96)==[]
    assert fit(80)==[4]
    assert len(fit(96, loss_func=nn.CrossEntropyLoss(weight=torch.tensor([1.,2.,5.]).double())))==3

def test_graphs_are_freed():
    "No micro-batch is kept alive by the window: neither its graph nor its activations"
    seen,alive = [],[]
    def look(cb):
        gc.collect()
        seen.append(weakref.ref(cb.learn.pred)); alive.append(sum(r() is not None for r in seen))
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(6), Callback(after_pred=look)])
    learn.fit(1)
    assert max(alive)==1

@needs_gpu
def test_no_synchronisation_inside_a_window():
    "CUDA raises at any synchronisation inside a window, unless the loss has to count its targets"
    class On(Callback):
        order,run_valid = 1000,False
        def before_batch(self): torch.cuda.set_sync_debug_mode('error')
    class Off(Callback):
        order = -1000
        # after `AccumulateStep` has finished the gradients
        def before_step(self): torch.cuda.set_sync_debug_mode('default')
    for kw in dict(weight=lambda pred, y: len(y)), dict(average=False):
        learn = conv_learner([AccumulateStep(4, **kw),On(),Off()], device='cuda')
        learn.loss_func = lambda pred, y: F.cross_entropy(pred, y)   # a function of one's own counts samples
        try: learn.fit(1)
        finally: torch.cuda.set_sync_debug_mode('default')

@needs_gpu
@pytest.mark.parametrize('w', [None, [1.,10.,0.]])
def test_on_a_gpu(w):
    """The promise on a CUDA device, where weights stay there: with a micro-batch whose targets are all ignored, or
    all of a class of weight 0"""
    y = classes(76); y[8:16] = -100 if w is None else 2
    def train(bs, cb=None):
        learn = make_learner(make_dls(76, bs, y=y, shuffle=False),
                             loss_func=nn.CrossEntropyLoss(weight=w and torch.tensor(w).double()), cbs=cb)
        learn.dls.to('cuda')
        learn.fit_one_cycle(2)
        learn.model.cpu()
        return learn
    assert_same(train(8, AccumulateStep(4)), train(32))
