"""The promise on a device that is not the CPU: some cases of the other files, and what there is only on devices.

Everything is on the simulated accelerator, which also reports each race between streams."""
import gc,os,pickle,threading
import matplotlib,pytest
from harness import *
from fastai_accum.all import *
import test_endings,test_grid,test_lr_find,test_patch
from test_exact import PictureNet,images,of_pictures
matplotlib.use('Agg')
SECOND = GPU.replace('0', '1')
needs_two = pytest.mark.skipif(GPU=='cuda:0' and torch.cuda.device_count()<2, reason='needs two devices')

# all data is on the first device, and so is each model
pytestmark = [pytest.mark.parametrize('device', [GPU], indirect=True), pytest.mark.usefixtures('device')]

# ---- cases of the other files

@pytest.mark.parametrize('opt,fit,case', [('adam','one_cycle','tail_smaller'),
                                          ('torch_adamw','fine_tune','n_samples')])
def test_grid_of_the_promise(opt, fit, case): test_grid.check(opt, fit, case)

def test_lr_find_curve(tmp_path): test_lr_find.curve('n_samples', 'patch', tmp_path)

def test_turn_on_accumulation(tmp_path): test_patch.check('one_cycle', 'n_step', True, tmp_path)

endings = {str(e):e for e in test_endings.table}

@pytest.mark.parametrize('ending,follower', [
    *(('KeyboardInterrupt-after_backward-5-0',o) for o in ('fit','lr_find')), ('OutOfMemoryError-model-7-0','fit')])
def test_follows(ending, follower, tmp_path): test_endings.follow(endings[ending], follower, tmp_path)

# ---- micro-batches

whole = partial(same, bs=32, large=32, splitter=trainable_params)

@pytest.mark.parametrize('kw', [dict(), dict(coupled=True), dict(exact=True)], ids=str)
def test_slices(kw):
    whole(lambda: MicroBatch(5, **kw))
    same(lambda: [AccumulateStep(4), MicroBatch(3, **kw)], also=lambda: GradientClip(.01))

def grows(pct): return 1 if pct<.3 else 3 if pct<.7 else 6

def test_windows_on_a_schedule(monkeypatch):
    "As on the CPU"
    def train():
        learn = make_learner(make_dls(76, 8), cbs=AccumulateStep(n_samples=lambda pct: 8*grows(pct), drop_last=True))
        learn.fit_one_cycle(3)
        return learn
    a = train()
    monkeypatch.setattr(here, 'device', torch.device('cpu'))
    b = train()
    assert_same(a, b)
    assert a.accumulate_step.counts.sizes==b.accumulate_step.counts.sizes and len(set(a.accumulate_step.counts.sizes))>2

# ---- mixed precision

class Float32(Callback):
    "Inputs in float32"
    order = -2
    def before_batch(self): self.learn.xb = tuple(o.float() for o in self.xb)

seen = set()
class Notes(nn.Linear):
    "Notes the dtypes of what it computes, also where that is computed again, but not in trials"
    def forward(self, x):
        res = super().forward(x)
        if x.dtype!=torch.float64 and torch.is_grad_enabled(): seen.add(res.dtype)
        return res

def noting(norm=nn.Identity):
    torch.manual_seed(0)
    return nn.Sequential(Notes(6, 5, bias=False), norm(5), nn.Tanh(), Notes(5, 3))

class Mixed(Callback):
    "Notes the scales; one window overflows"
    order,run_valid = 9,False   # before `MixedPrecision`
    def __init__(self, at): self.at,self.n,self.scales = at,0,[]
    def before_step(self):
        if self.n==self.at: next(self.model.parameters()).grad[0,0] = math.inf
        self.n += 1
    def after_epoch(self): self.scales.append(self.learn.scaler.get_scale())

def mixed(mode, cbs, bs, at, model, x=None):
    set_seed(0)
    learn = make_learner(make_dls(76 if x is None else len(x), bs, x=x), model().float(), opt_func=SGD, splitter=params,
                         cbs=[Float32(), MixedPrecision(mode, init_scale=2.**10), Mixed(at), *cbs])
    learn.fit(3, .1)
    return learn

ways = dict(accumulate=(lambda: [AccumulateStep(4)],8), slices=(lambda: [MicroBatch(8)],32),
            coupled=(lambda: [MicroBatch(8, coupled=True)],32), exact=(lambda: [MicroBatch(8, exact=True)],32))

@drawn(4, mode=['fp16','bf16'], k=ways)
def test_mixed_precision(mode, k):
    "Half precision rounds a large batch and micro-batches differently, by one unit; the scales are the same"
    dtype = dict(fp16=torch.float16, bf16=torch.bfloat16)[mode]
    (cbs,bs),model = ways[k],partial(noting, nn.BatchNorm1d if k=='exact' else nn.Identity)
    at = 4 if mode=='fp16' else None   # there is no scaler that would skip in bfloat16
    seen.clear()
    a,b = mixed(mode, cbs(), bs, at, model),mixed(mode, [], 32, at, model)
    close(*([*l.model.parameters()] for l in (a,b)), HALF[dtype])
    assert seen=={dtype}
    assert a.mixed.scales==b.mixed.scales==([1024.,512.,512.] if at else [1.]*3)
    assert len(a.spy.steps)==len(b.spy.steps)==(8 if at else 9)

@each(mode=['fp16','bf16'])
def test_mixed_precision_bit_for_bit(mode):
    "What is computed again is computed in half precision again"
    a,b = (mixed(mode, cbs, 8, None, PictureNet, images) for cbs in ([GradientCheckpointing(),OffloadActivations()],[]))
    assert_same(a, b, tol=0)

# ---- attention that draws inside

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv,self.out = nn.Linear(6,24),nn.Linear(8,3)
    def forward(self, x):
        qkv = self.qkv(x).unflatten(2, (3,2,4)).permute(2,0,3,1,4)   # heads of 4 numbers
        h = F.scaled_dot_product_attention(*qkv, dropout_p=.3*self.training)
        return self.out(h.transpose(1,2).flatten(2).mean(1))

def attends(*cbs):
    set_seed(0)
    x = features(64, 30).view(64,5,6)
    learn = make_learner(make_dls(64, 16, x=x), nn.Sequential(Attends()), cbs=[Float32(),*cbs], splitter=params)
    learn.fit(2)
    return learn

def test_fused_attention_draws_the_same_again_and_cannot_be_exact():
    assert_same(attends(GradientCheckpointing(blocks=risinstance(Attends)), OffloadActivations()), attends(), tol=0)
    with pytest.raises(ValueError, match='sdpa_kernel'): attends(MicroBatch(8, exact=True))

# ---- other devices, other streams

memory = lambda: [GradientCheckpointing(), OffloadActivations()]
cases = dict(accumulate=lambda: [AccumulateStep(2)], slices=lambda: [MicroBatch(3)], memory=memory,
             coupled=lambda: [MicroBatch(3, coupled=True)], exact=lambda: [MicroBatch(3, exact=True)])
every = pytest.mark.parametrize('k', cases)

class Two(nn.Module):
    "Begins on the first device and ends on the second"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(768,8,bias=False), nn.BatchNorm1d(8), nn.Tanh()).to(GPU)
        self.b = nn.Sequential(nn.Dropout(.2), nn.Linear(8,8), nn.Tanh(), nn.Linear(8,3)).to(SECOND)
    def forward(self, x): return self.b(self.a(x).to(self.b[1].weight.device)).to(x.device)

def train(k, model=PictureNet):
    "With and without callbacks `k`"
    def fit(cbs, bs=8):
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', '.*batch norm')   # it does see micro-batches here
            return of_pictures(*cbs, model=model, bs=bs)
    return (fit(cases[k](), 4),fit([])) if k=='accumulate' else (fit(cases[k]()),fit([]))

class Plain(nn.Sequential):
    "Without batch norm and dropout"
    def __init__(self):
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.Tanh()), nn.Linear(8,3))

def model_for(k, model): return model if k in ('exact','memory') else Plain

@needs_two
@every
def test_the_second_device(k, fakegpu, monkeypatch):
    "While the first is the current one, which has nothing to do"
    monkeypatch.setattr(here, 'device', torch.device(SECOND))
    before = fakegpu.memory_allocated(0)
    fakegpu.reset_peak_memory_stats(0)
    a,b = train(k, model_for(k, PictureNet))
    assert_same(a, b)
    assert next(a.model.parameters()).device.index==1 and fakegpu.current_device()==0
    assert fakegpu.max_memory_allocated(0)==before

@needs_two
@pytest.mark.parametrize('k', ['memory','exact'])
def test_a_model_over_two_devices(k, fakegpu, monkeypatch):
    monkeypatch.setattr(here, 'device', None)   # or fastai would move all of it
    a,b = train(k, Two)
    assert_same(a, b)
    assert {p.device.index for p in a.model.parameters()}=={0,1}

@needs_two
def test_micro_batches_over_two_devices(monkeypatch):
    def model():
        m = Two()
        m.a[2] = m.b[0] = nn.Identity()
        return m.double()
    monkeypatch.setattr(here, 'device', None)
    for cbs,bs in ([AccumulateStep(4)],8),([MicroBatch(5)],32),([MicroBatch(5, coupled=True)],32):
        same(lambda: cbs, bs, x=features(76, 768), model=model, also=lambda: GradientClip(.1), splitter=params)

@pytest.mark.parametrize('k', ['coupled','exact'])
def test_a_stream_of_ones_own(k, fakegpu):
    own = fakegpu.Stream()
    with fakegpu.stream(own):
        a,b = train(k, model_for(k, PictureNet))
        assert_same(a, b)
        assert fakegpu.current_stream()==own
    own.synchronize()

# ---- what is left

def kept(fakegpu, learn):
    "Bytes on the devices, threads, and pinned memory, when the learner has let go of its last batch"
    learn._end_cleanup()
    learn.loss_grad = None
    gc.collect()
    fakegpu.synchronize()
    threads = len(os.listdir('/proc/self/task')) if os.path.exists('/proc') else threading.active_count()
    used = map(fakegpu.memory_allocated, range(fakegpu.device_count()))
    return *used,threads,fakegpu.pinned_stats()['count'],fakegpu.pending()

@drawn(4, k=cases, event=['after_pred','after_backward'])
def test_ctrl_c_leaves_nothing(k, event, fakegpu):
    "In the second micro-batch of a window, or in the second slice of a batch"
    learn = make_learner(make_dls(20, 4, x=images), PictureNet().double(), cbs=cases[k](), splitter=params)
    learn.remove_cbs(learn.cbs.filter(lambda cb: isinstance(cb, (Spy,Micro))))
    learn.fit(1)
    before = kept(fakegpu, learn)
    n = itertools.count()
    def interrupt(cb):
        if cb.training and next(n)==1: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=EachMicro(**{event:interrupt}))
    assert all(a<=b for a,b in zip(kept(fakegpu, learn), before))
    assert is_returned(learn)
    learn.fit(1)
    assert kept(fakegpu, learn)==before

class Steady(PictureNet):
    "Which draws in training only"
    def forward(self, x):
        x = self.stem(x)
        for m in self.blocks: x = F.relu(x+m(x))
        return self.head(x)

@pytest.mark.parametrize('k', ['memory','exact'])
def test_export_and_pickle(k, tmp_path, fakegpu):
    "What comes back predicts as before, on the CPU, and trains as before, on the device"
    learn = make_learner(make_dls(20, 4, x=images), Steady().double(), cbs=cases[k](), splitter=params, path=tmp_path)
    learn.remove_cbs(learn.cbs.filter(lambda cb: isinstance(cb, (Spy,Micro))))
    learn.fit(1)
    preds = learn.get_preds()[0]
    other = pickle.loads(pickle.dumps(learn))
    learn.logger = print
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # that what is loaded may run code
        learn.export('a.pkl')
        loaded = load_learner(tmp_path/'a.pkl')
    learn.logger = noop
    assert {p.device.type for p in loaded.model.parameters()}=={'cpu'}
    close(loaded.get_preds(dl=learn.dls.valid.new(device='cpu'))[0], preds)
    after = []
    for l in (learn,other):
        set_seed(3)
        l.dls.train.rng.seed(3)
        l.fit(1)
        after.append(list(l.model.parameters()))
    close(*after, 0)
    assert all(p.device==here.device for p in other.model.parameters())
