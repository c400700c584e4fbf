"""The promise on a device that is not the CPU: some cases of the other files, and what there is only on devices.

Everything is on the simulated accelerator, which also reports each race between streams."""
import pickle,matplotlib
from nets import *
from fastai_accum.all import *
from kinds import Odd
import test_endings,test_lr_find
from test_exact import X2,Y2,PictureNet,draws,images,of_pictures,same_slices
matplotlib.use('Agg')
SECOND = GPU.replace('0', '1')
needs_two = pytest.mark.skipif(GPU=='cuda:0' and torch.cuda.device_count()<2, reason='needs two devices')

# all data is on the first device, and so is each model
pytestmark = [pytest.mark.parametrize('device', [GPU], indirect=True), pytest.mark.usefixtures('device'),
              pytest.mark.filterwarnings('ignore:.*batch norm')]   # it does see micro-batches here

# ---- cases of the other files

def test_lr_find_curve_and_turn_on_accumulation(tmp_path): test_lr_find.curve('n_samples', 'patch', tmp_path)

@each(case=[('KeyboardInterrupt-after_backward-5-0','fit'), ('KeyboardInterrupt-after_backward-5-0','lr_find'),
            ('OutOfMemoryError-model-7-0','fit')])
def test_follows(case, tmp_path):
    ending,follower = case
    test_endings.follow(first(e for e in test_endings.table if str(e)==ending), follower, tmp_path)

# ---- micro-batches

@each(kw=[dict(), dict(coupled=True), dict(exact=True)])
def test_slices(kw):
    same(lambda: MicroBatch(5, **kw), 32, splitter=trainable_params)
    same(lambda: [AccumulateStep(4), MicroBatch(3, **kw)], also=lambda: GradientClip(.01))

# ---- mixed precision

seen = set()
def noting(norm):
    "Notes the dtypes of what it computes, also where that is computed again, but not in trials"
    m = layers(norm(5), bias=False).float()
    def note(m, xs, y): return seen.add(y.dtype) if xs[0].dtype!=torch.float64 and torch.is_grad_enabled() else None
    for o in m[0],m[3]: o.register_forward_hook(note)
    return m

class Mixed(Callback):
    "Notes the scales; one window overflows"
    order,run_valid = 9,False   # before `MixedPrecision`
    def __init__(self, at): self.at,self.n,self.scales = at,0,[]
    def before_step(self):
        if self.n==self.at: next(self.model.parameters()).grad[0,0] = math.inf
        self.n += 1
    def after_epoch(self): self.scales.append(self.learn.scaler.get_scale())

def in_float32(x, model, bs, *cbs, n_epoch=2):
    set_seed(0)
    learn = make_learner(make_dls(len(x), bs, x=x.float()), model(), opt_func=SGD, splitter=params, cbs=cbs)
    learn.fit(n_epoch, .1)
    return learn

def mixed(mode, cbs, bs, at, model, x=features(76)):
    return in_float32(x, model, bs, MixedPrecision(mode, init_scale=2.**10), Mixed(at), *cbs, n_epoch=3)

cases = dict(
    accumulate=lambda n: [AccumulateStep(n)], memory=lambda n: [GradientCheckpointing(), OffloadActivations()],
    slices=lambda n: [MicroBatch(n)], coupled=lambda n: [MicroBatch(n, coupled=True)],
    exact=lambda n: [MicroBatch(n, exact=True)])

@drawn(4, mode=['fp16','bf16'], k=[o for o in cases if o!='memory'])
def test_mixed_precision(mode, k):
    "Half precision rounds a large batch and micro-batches differently, by one unit; the scales are the same"
    dtype = dict(fp16=torch.float16, bf16=torch.bfloat16)[mode]
    cbs,bs = (cases[k](4),8) if k=='accumulate' else (cases[k](8),32)
    model = partial(noting, nn.BatchNorm1d if k=='exact' else nn.Identity)
    at = 4 if mode=='fp16' else None   # there is no scaler that would skip in bfloat16
    seen.clear()
    a,b = mixed(mode, cbs, bs, at, model),mixed(mode, [], 32, at, model)
    close(*([*l.model.parameters()] for l in (a,b)), HALF[dtype])
    assert seen=={dtype}
    assert a.mixed.scales==b.mixed.scales==([1024.,512.,512.] if at else [1.]*3)
    assert len(a.spy.steps)==len(b.spy.steps)==(8 if at else 9)

@each(mode=['fp16','bf16'])
def test_mixed_precision_bit_for_bit(mode):
    "What is computed again is computed in half precision again"
    a,b = (mixed(mode, cbs, 8, None, PictureNet, images) for cbs in (cases['memory'](0),[]))
    assert_same(a, b, tol=0)

# ---- dropout that is one operation, and attention that draws inside

@each(k=['weight','attention'])
def test_dropout_in_one_operation(k): same_slices(draws[k], X2, Y2)

def attend(m, x):
    qkv = m.qkv(x).unflatten(2, (3,2,4)).permute(2,0,3,1,4)   # heads of 4 numbers
    h = F.scaled_dot_product_attention(*qkv, dropout_p=.3*m.training)
    return m.out(h.transpose(1,2).flatten(2).mean(1))

def attends(*cbs):
    def model(): return nn.Sequential(Odd(attend, qkv=nn.Linear(6,24), out=nn.Linear(8,3)))
    return in_float32(features(64, 30).view(64,5,6), model, 16, *cbs)

def test_fused_attention_draws_the_same_again_and_cannot_be_exact():
    assert_same(attends(GradientCheckpointing(blocks=risinstance(Odd)), OffloadActivations()), attends(), tol=0)
    with pytest.raises(ValueError, match='sdpa_kernel'): attends(MicroBatch(8, exact=True))

# ---- other devices, other streams

class Two(nn.Module):
    "Begins on the first device and ends on the second, or is all on one; with batch norm and dropout, or `plain`"
    def __init__(self, plain=False, one=False):
        super().__init__()
        torch.manual_seed(0)
        norm,drop = (nn.Identity,nn.Identity) if plain else (nn.BatchNorm1d,nn.Dropout)
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(768,8,bias=False), norm(8), nn.Tanh())
        self.b = nn.Sequential(drop(), nn.Linear(8,8), nn.Tanh(), nn.Linear(8,3))
        if not one: self.a.to(GPU); self.b.to(SECOND)
    def forward(self, x): return self.b(self.a(x).to(self.b[1].weight.device)).to(x.device)

def train_both(k, model=PictureNet, **kwargs):
    "With and without callbacks `k`"
    model = model if k in ('exact','memory') else partial(Two, plain=True, **kwargs)
    cbs,bs = (cases[k](2),4) if k=='accumulate' else (cases[k](3),8)
    a,b = of_pictures(*cbs, model=model, bs=bs),of_pictures(model=model)
    assert_same(a, b)
    return {p.device.index for p in a.model.parameters()}

@needs_two
@pytest.mark.parametrize('k', cases)
def test_the_second_device(k, fakegpu, monkeypatch):
    "While the first is the current one, which has nothing to do"
    monkeypatch.setattr(here, 'device', torch.device(SECOND))
    before = fakegpu.memory_allocated(0)
    fakegpu.reset_peak_memory_stats(0)
    assert train_both(k, one=True)=={1} and fakegpu.current_device()==0 and fakegpu.max_memory_allocated(0)==before

@needs_two
@each(k=cases)
def test_a_model_over_two_devices(k, fakegpu, monkeypatch):
    monkeypatch.setattr(here, 'device', None)   # or fastai would move all of it
    assert train_both(k, Two)=={0,1}

@each(k=['coupled','exact'])
def test_a_stream_of_ones_own(k, fakegpu):
    own = fakegpu.Stream()
    with fakegpu.stream(own):
        train_both(k, one=True)
        assert fakegpu.current_stream()==own
    own.synchronize()

# ---- what comes back

def small_learner(k, model=PictureNet, **kwargs):
    learn = make_learner(make_dls(20, 4, x=images), model().double(), cbs=cases[k](2), splitter=params, **kwargs)
    learn.remove_cbs(learn.cbs.filter(risinstance((Spy,Micro))))
    learn.fit(1)
    return learn

@pytest.mark.parametrize('k', ['memory','exact'])
@pytest.mark.filterwarnings('ignore')   # that what is loaded may run code
def test_export_and_pickle(k, tmp_path, fakegpu):
    "What comes back predicts as before, on the CPU, and trains as before, on the device"
    learn = small_learner(k, partial(Two, one=True), path=tmp_path)
    preds = learn.get_preds()[0]
    other = pickle.loads(pickle.dumps(learn))
    learn.logger = print
    learn.export('a.pkl')
    learn.logger,loaded = noop,load_learner(tmp_path/'a.pkl')
    assert {p.device.type for p in loaded.model.parameters()}=={'cpu'}
    close(loaded.get_preds(dl=learn.dls.valid.new(device='cpu'))[0], preds)
    for l in learn,other:
        set_seed(3)
        l.dls.train.rng.seed(3)
        l.fit(1)
    close(weights(learn), weights(other), 0)
    assert all(p.device==here.device for p in other.model.parameters())
