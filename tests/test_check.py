"""`check_accumulation` on learners with known causes. Each remedy that it names is tried, and the learner stays as
it was"""
import _thread,signal,time,warnings
import pytest
from harness import *
from fastai.vision.augment import RandTransform
from fastai.callback.mixup import CutMix,MixUp
from fastai.callback.training import GradientClip
from fastai_accum.all import *
from fastai_accum.know.check import *
from fastai_accum.state import State
from fastai_accum.patch import accumulation_settings

tol = 1e-8   # rounding in float64 is smaller

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'benchmarks'))
from common import peak_bytes

@pytest.fixture(autouse=True)
def _seed():
    assert torch.get_default_dtype()==torch.float32   # or a test has left float64
    set_seed(0)

def net(*ms): return nn.Sequential(nn.Linear(6,5), *ms, nn.Tanh(), nn.Linear(5,3)).double()
def ce(): return nn.CrossEntropyLoss()
def learner(model=None, loss_func=None, cbs=None, y=None, bs=8, n=64, x=None, shuffle=True, **kwargs):
    learn = Learner(make_dls(n, bs, y=y, x=x, shuffle=shuffle), small_model() if model is None else model,
                    loss_func=loss_func or ce(), cbs=cbs, opt_func=SGD, **kwargs)
    return learn.remove_cb(ProgressCallback)

def targets(): return features(64, 3, seed=5)
def rmse(p, y): return ((p-y)**2).mean().sqrt()
def masked(p, y):
    m = y!=0
    return (F.cross_entropy(p, y, reduction='none')*m).sum()/m.sum()
def contrastive(p, y):
    p = F.normalize(p)
    return F.cross_entropy(p@p.T/.1, torch.arange(len(p)).roll(1))
def class_weights(p, y): return F.cross_entropy(p, y, weight=torch.tensor([1.,2.,3.], dtype=p.dtype))

class Centre(nn.Module):
    def forward(self, x): return x-x.mean(0)
class ClipValues(Callback):
    def after_backward(self): nn.utils.clip_grad_value_(self.learn.model.parameters(), .01)
class Flip(Callback):
    "Swaps the inputs of samples"
    def before_batch(self): self.learn.xb = (self.learn.xb[0].flip(0),)

def kinds(check): return [o.kind for o in check.causes]
def clean(check):
    assert not check.causes and check.error<=1e-12, check
    return check

# what has no cause
def test_plain():
    "Also with losses that fastai rounds to float32, and a model in float32"
    for loss_func in nn.CrossEntropyLoss,CrossEntropyLossFlat,FocalLossFlat,LabelSmoothingCrossEntropyFlat:
        clean(learner(small_model().float(), loss_func(), x=features(64).float()).check_accumulation())

def test_float32_within():
    "A model and a loss that ask for float32 by hand are float64 in the check"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.lin,self.const = nn.Linear(6,3),torch.full((3,), .1)
        def forward(self, x):
            return self.lin(x.float()).to(torch.float32)*self.const + torch.zeros(3, dtype=torch.float32)
    clean(learner(Model(), lambda p,y: F.cross_entropy(p.float(), y), x=features(64).float()).check_accumulation())

@each(cbs=[AccumulateStep(n_samples=24), MicroBatch(), MicroBatch(2, coupled=True),
                                 [AccumulateStep(2), MicroBatch(4)],
                                 [AccumulateStep(n_samples=16), MicroBatch(4)],
                                 [AccumulateStep(2), GradAccumDtype()], GradientClip(.1)])
def test_clean_settings(cbs): clean(learner(cbs=deepcopy(cbs)).check_accumulation())

def test_sizes():
    "The last micro-batch is smaller, unless it would have one sample only"
    for bs,n,size in (2,2,1),(3,3,1),(4,4,2),(5,4,2),(6,5,3),(8,7,4),(100,63,8):
        compared = clean(learner().check_accumulation(bs)).compared
        assert f'{n} samples' in compared and f'micro-batches of at most {size}' in compared, bs

def test_check_of_exact():
    clean(learner(net(nn.BatchNorm1d(5), nn.Dropout()), rmse, MicroBatch(4, exact=True),
                  targets()).check_accumulation())
class Jacobian(nn.Module):
    "Adds the size of its own slope at each sample, as contractive and physics-informed models do"
    def __init__(self):
        super().__init__()
        self.inner = net()
    def forward(self, x):
        slope = torch.func.vmap(torch.func.jacrev(self.inner))(x)
        return self.inner(x)+slope.pow(2).sum((1,2))[:,None]

@each(cbs=[None, MicroBatch(4)])
def test_model_that_differentiates_itself(cbs): clean(learner(Jacobian(), cbs=cbs).check_accumulation())

@each(way=['coupled','exact'])
def test_own_setting_that_cannot_work(way):
    "The check says what the fit says, which is not PyTorch's error alone"
    check = learner(Jacobian(), cbs=MicroBatch(4, **{way:True})).check_accumulation
    with pytest.raises(ValueError, match=f'{way}=True is not possible.*saved tensor hooks.*Leave {way} out'): check()

def test_norm_without_bias():
    bn = nn.BatchNorm1d(5)
    bn.register_parameter('bias', None)
    assert kinds(learner(net(bn)).check_accumulation())==['batch norm']

def test_coupled(): clean(learner(loss_func=contrastive, cbs=MicroBatch(4, coupled=True)).check_accumulation())

def test_patch():
    "Its settings are what is checked, and stay"
    learn = learner(loss_func=masked)
    with accumulation(4):
        assert kinds(learn.check_accumulation())==['loss'] and accumulation_settings()==dict(n_step=4)
    with accumulation(4, weight=lambda p,y: (y!=0).sum()): clean(learn.check_accumulation())
    assert kinds(learn.check_accumulation())==['loss'] and accumulation_settings() is None

# causes
cases = dict(
    norm=(lambda: learner(net(nn.BatchNorm1d(5))), {'batch norm':'1'}),
    norm_without_parameters=(lambda: learner(net(nn.BatchNorm1d(5, affine=False, track_running_stats=False))),
                             {'batch norm':'1'}),
    dropout=(lambda: learner(net(nn.Dropout(.3))), {'dropout':'1'}),
    dropouts=(lambda: learner(net(nn.Dropout(.3), nn.AlphaDropout(.2))), {'dropout':'1'}),
    rmse=(lambda: learner(loss_func=rmse, y=targets()), {'loss':'rmse'}),
    masked=(lambda: learner(loss_func=masked), {'loss':'masked'}),
    contrastive=(lambda: learner(loss_func=contrastive), {'loss':'contrastive'}),
    sum=(lambda: learner(loss_func=nn.CrossEntropyLoss(reduction='sum')), {'loss':'CrossEntropyLoss'}),
    smooth=(lambda: learner(loss_func=LabelSmoothingCrossEntropy(weight=tensor([1.,2.,3.]))),
            {'loss':'LabelSmoothingCrossEntropy'}),
    mixup=(lambda: learner(loss_func=CrossEntropyLossFlat(), cbs=MixUp()), {'augmentation':'MixUp'}),
    flip=(lambda: learner(cbs=Flip()), {'augmentation':'Flip'}),
    clip=(lambda: learner(cbs=ClipValues()), {'callback':'ClipValues'}),
    two_of_three=(lambda: learner(loss_func=CrossEntropyLossFlat(), cbs=[ClipValues(), GradientClip(.1), MixUp()]),
                  {'callback':'ClipValues', 'augmentation':'MixUp'}),
    centre=(lambda: learner(net(Centre())), {'unknown':'1'}),
    centre_dropout=(lambda: learner(net(Centre(), nn.Dropout())), {'dropout':'2', 'unknown':'1'}),
    several=(lambda: learner(net(nn.BatchNorm1d(5), nn.Dropout()), rmse, y=targets()),
             {'batch norm':'1', 'dropout':'2', 'loss':'rmse'}),
    dropout_first=(lambda: learner(net(nn.Dropout(), nn.BatchNorm1d(5))), {'dropout':'1', 'batch norm':'2'}),
    both=(lambda: learner(net(nn.BatchNorm1d(5)), cbs=[AccumulateStep(2), MicroBatch(4)]), {'batch norm':'1'}),
    window_of_exact=(lambda: learner(net(nn.BatchNorm1d(5)), cbs=[AccumulateStep(2), MicroBatch(4, exact=True)]),
                     {'batch norm':'1'}),
    slices=(lambda: learner(net(nn.BatchNorm1d(5)), cbs=MicroBatch(4)), {'batch norm':'1'}))

@pytest.mark.parametrize('case', cases)
def test_causes(case):
    "Each cause is found, and each line that is named is applied and checked again, if not a person has to write it"
    make,expected = cases[case]
    learn = make()
    check = learn.check_accumulation()
    assert {o.kind:o.where for o in check.causes}==expected, check
    assert check.error>tol and all(o.error>tol and o.remedy for o in check.causes)
    if 'centre' in case: return
    lines = [o.remedy.split(' instead of')[0].split('; or')[0] for o in check.causes]
    assert all(o.startswith(('MicroBatch','AccumulateStep')) for o in lines), lines
    lines = [o for o in lines if 'exact' in o][:1] or [o for o in lines if 'coupled' in o][:1] or lines
    learn.remove_cbs(learn.cbs.filter(risinstance((AccumulateStep,MicroBatch))))
    clean(learn.add_cb(eval(lines[0])).check_accumulation())

def test_unknown_in_root():
    "It names the first module whose output is another"
    class Root(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(6,5),nn.Linear(5,3)
        def forward(self, x): x = self.a(x).tanh(); return self.b(x-x.mean(0))
    check = learner(Root().double()).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('unknown','b')]

def test_unknown_in_learner():
    class Ranks(Learner):
        def _do_grad_opt(self):
            self.loss_grad = self.loss_grad**2
            super()._do_grad_opt()
    dls = make_dls(64, 8)
    cause, = Ranks(dls, small_model(), loss_func=ce()).remove_cb(ProgressCallback).check_accumulation().causes
    assert cause.kind=='unknown' and 'coupled=True' in cause.remedy

def test_needs_each_other():
    "A callback is not a suspect if the learner cannot run without it"
    class Pack(nn.Module):
        def __init__(self): super().__init__(); self.net = net(nn.Dropout())
        def forward(self, x): return dict(logits=self.net(x))
    class Unpack(Callback):
        def after_pred(self): self.learn.pred = self.learn.pred['logits']
    check = learner(Pack(), cbs=[Unpack(), ClipValues()]).check_accumulation()
    assert {o.kind:o.where for o in check.causes}=={'dropout':'net.1', 'callback':'ClipValues'}

def test_other_remedies():
    learn = learner(net(nn.BatchNorm1d(5)))
    cause, = learn.check_accumulation().causes
    assert 'BatchNormEval()' in cause.remedy
    clean(learn.add_cb(BatchNormEval()).check_accumulation())
    learn.model[1] = nn.GroupNorm(1, 5).double()
    clean(learn.remove_cb(BatchNormEval).check_accumulation())
    remedy = learner(net(Centre())).check_accumulation().causes[0].remedy
    assert 'OffloadActivations()' in remedy and 'GradientCheckpointing' not in remedy   # which finds no blocks

def test_a_loss_says_how_to_weigh_it():
    "A mean with another divisor, and one that is no mean"
    for f,y in ((masked,None), (class_weights,None), (rmse,targets())):
        remedy = learner(loss_func=f, y=y).check_accumulation().causes[0].remedy
        assert remedy.startswith('MicroBatch(bs=4, coupled=True)') and 'weight=lambda pred, *yb:' in remedy

def test_wrong_weight():
    "A wrong `weight=` of the user"
    check = learner(cbs=AccumulateStep(2, weight=lambda p,y: 1+(y!=0).sum())).check_accumulation()
    assert kinds(check)==['loss']

# batches
class Several(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(6,3),nn.Linear(6,3)
    def forward(self, x, z): return self.a(x)+self.b(z)

def batches_learner(items, model, loss_func, n_inp, cbs=None, shuffle=True):
    dls = DataLoaders(DataLoader(items, bs=8, shuffle=shuffle), DataLoader(items, bs=8))
    dls.n_inp = n_inp
    return Learner(dls, model.double(), loss_func=loss_func, cbs=cbs).remove_cb(ProgressCallback)

def test_two_inputs():
    items = list(zip(features(32), features(32, seed=3), classes(32)))
    clean(batches_learner(items, Several(), ce(), 2).check_accumulation())
    assert kinds(batches_learner(items, Several(), masked, 2).check_accumulation())==['loss']

def test_dictionaries():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.net = net(nn.BatchNorm1d(5))
        def forward(self, b): return dict(logits=self.net(b['x']), more=b['x'])
    items = [(dict(x=x), dict(y=y, mask=(y>0).double())) for x,y in zip(features(32), classes(32))]
    def loss(p, t): return (F.cross_entropy(p['logits'], t['y'], reduction='none')*t['mask']).sum()/t['mask'].sum()
    check = batches_learner(items, Model(), loss, 1).check_accumulation()
    assert {o.kind:o.where for o in check.causes}=={'batch norm':'net.1', 'loss':'loss'}
    assert 'exact=True' in check.causes[0].remedy

def test_loss_in_model():
    "The model returns its loss"
    class Model(nn.Module):
        def __init__(self, loss): super().__init__(); self.net,self.loss = small_model(),loss
        def forward(self, b): return self.loss(self.net(b['x']), b['y'])
    items = [(dict(x=x, y=y), torch.tensor(0)) for x,y in zip(features(32), classes(32))]
    clean(batches_learner(items, Model(ce()), lambda p,y: p, 1).check_accumulation())
    items = [(dict(x=o['x'], y=torch.tensor(i%8>1).long()), y) for i,(o,y) in enumerate(items)]
    cause, = batches_learner(items, Model(masked), lambda p,y: p, 1, shuffle=False).check_accumulation().causes
    assert cause.kind=='unknown'

# as before
def state(learn):
    "What a check must leave as it was"
    names = ('training','lock','opt','model','loss_func','dls','opt_func','logger')
    return ([(id(o), {k:id(v) for k,v in vars(o).items()}) for o in (learn, *learn.cbs, learn.loss_func,
                                                                     *learn.model.modules()) if hasattr(o, '__dict__')],
            [id(o) for o in learn.cbs],
            [p.detach().clone() for p in learn.model.parameters()], [b.clone() for b in learn.model.buffers()],
            [(id(p.grad), None if p.grad is None else p.grad.clone(), p.requires_grad)
             for p in learn.model.parameters()],
            None if learn.opt is None else (deepcopy(learn.opt.state_dict()), [dict(h) for h in learn.opt.hypers]),
            [m.training for m in learn.model.modules()],
            random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), torch.get_default_dtype(),
            dict(vars(defaults)))

def assert_as_before(before, learn):
    for i,(a,b) in enumerate(zip(before, state(learn))): assert identical(a, b), f'{i}: {a} is now {b}'

@drawn(4, cbs=[None, [AccumulateStep(2), MixUp()], MicroBatch(4, exact=True), MicroBatch(4, coupled=True)],
       fitted=[False,True])
def test_as_before(cbs, fitted):
    learn = learner(net(nn.BatchNorm1d(5), nn.Dropout()).float(), CrossEntropyLossFlat(), deepcopy(cbs),
                    x=features(64).float())
    if fitted:
        with learn.no_logging(): learn.fit(1)
        for p in learn.model[:2].parameters(): p.grad = torch.ones_like(p)
    learn.model[0].requires_grad_(False); learn.model[2].eval()
    before = state(learn)
    learn.check_accumulation()
    assert_as_before(before, learn)

def test_fits_as_before():
    "A fit after a check is the same as a fit without a check"
    def fit(check):
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(6).double(), net(nn.Dropout()))
        learn = learner(model, masked, [AccumulateStep(3), Spy()])
        learn.recorder.smooth_loss = AvgSmoothLoss64()
        if check: learn.check_accumulation()
        with learn.no_logging():
            learn.fit(1)
            if check: learn.check_accumulation()
            learn.fit(1)
        return learn
    assert_same(fit(True), fit(False), tol=0)

def test_ctrl_c_while_the_learner_is_set_back(monkeypatch):
    "Setting back goes on to its end"
    learn,put_back,n,at = learner(net(nn.BatchNorm1d(5)), cbs=AccumulateStep(2)),State.put_back,0,0
    def restore(self):
        nonlocal n
        n += 1
        if n==at: _thread.interrupt_main(); time.sleep(.01)
        put_back(self)
    monkeypatch.setattr(State, 'put_back', restore)
    learn.check_accumulation()   # proves its remedies once
    n = 0
    learn.check_accumulation()
    total,before,was = n,state(learn),signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for at in 1, total//2, total-1, total:
            n = 0
            with pytest.raises(KeyboardInterrupt): learn.check_accumulation()
            assert_as_before(before, learn)
    finally: signal.signal(signal.SIGINT, was)

def test_a_buffer_without_memory_of_its_own():
    "`expand` gives all its elements one place"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('w', torch.ones(1).expand(6))
            self.net = net(nn.BatchNorm1d(5))
        def forward(self, x): return self.net(x*self.w)
    learn = learner(Model())
    assert found(learn)==['batch norm'] and learn.model.w.shape==(6,)
    with learn.no_logging(): learn.recorder.smooth_loss = AvgSmoothLoss64(); learn.fit(1)

@drawn(4, where=['forward','before_batch','after_backward','loss'], error=[KeyboardInterrupt,RuntimeError])
def test_errors_leave_nothing(where, error):
    "However a check ends, also in the middle of its last trials"
    count = [0]
    def stop(at):
        count[0] += at==where
        if count[0]==limit: raise error('stop')
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.net = net(nn.BatchNorm1d(5))
        def forward(self, x): stop('forward'); return self.net(x)
    class Stop(Callback):
        def before_batch(self): stop('before_batch')
        def after_backward(self): stop('after_backward')
    def loss(p, y): stop('loss'); return masked(p, y)
    learn = learner(Model(), loss, Stop())
    with accumulation(2):
        for limit in 1,2,5,11:
            count[0],before = 0,state(learn)
            try: learn.check_accumulation()
            except error as e: assert 'stop' in str(e)
            else: assert error is RuntimeError or count[0]<limit   # an experiment that fails is no more than that
            assert_as_before(before, learn)
    with learn.no_logging(): learn.recorder.smooth_loss = AvgSmoothLoss64(); limit = -1; learn.fit(1)

def test_says_nothing(capsys, recwarn):
    "Neither prints nor warns; what `AccumulateStep` says once is still to come"
    from fastai_accum import refusals
    said = set(refusals._noted)
    learner(net(nn.BatchNorm1d(5)), cbs=[AccumulateStep(2), PrintAll()]).check_accumulation()
    out,err = capsys.readouterr()
    assert not out and not err and set(refusals._noted)==said and not [o for o in recwarn
                                                                if 'AccumulateStep' in str(o.message)]
class PrintAll(Callback):
    def before_batch(self): print('batch')

class Draws:
    "A dataset that draws by generators of its own"
    def __init__(self):
        self.np,self.py,self.torch = np.random.default_rng(0),random.Random(0),torch.Generator().manual_seed(0)
    def __len__(self): return 32
    def __getitem__(self, i):
        noise = self.np.normal()+self.py.random()+torch.rand(1, generator=self.torch).item()
        noise += random.random()+np.random.rand()+torch.rand(1).item()
        return features(32)[i]+noise,classes(32)[i]

def fastai_dl():      return DataLoader(Draws(), bs=8, shuffle=True, num_workers=0)
def workers():        return DataLoader(list(zip(features(32), classes(32))), bs=8, shuffle=True, num_workers=1)
def augmented():
    class Noise(RandTransform):
        def encodes(self, x:TensorBase): return x+torch.randn_like(x)
    return TfmdDL(TfmdLists(list(range(32)), [lambda i: (TensorBase(features(32)[i]), TensorCategory(classes(32)[i]))]),
                  bs=8, shuffle=True, after_batch=[Noise()], num_workers=0)
def torch_dl(**kw):   return torch.utils.data.DataLoader(Draws(), batch_size=8, **kw)
def torch_generator():return torch_dl(shuffle=True, generator=torch.Generator().manual_seed(3))
def torch_workers():  return torch.utils.data.DataLoader(list(zip(features(32), classes(32))), batch_size=8,
                                                         shuffle=True, num_workers=1, timeout=9)
def torch_sampler():  return torch_dl(sampler=torch.utils.data.WeightedRandomSampler(torch.rand(32), 32,
    generator=torch.Generator().manual_seed(3)))
def of_batches():     return [(features(8), classes(8))]*3

@pytest.mark.parametrize('make', [fastai_dl, workers, augmented, torch_generator, torch_workers,
                                  torch_sampler, of_batches], ids=lambda o: o.__name__)
def test_loaders(make):
    "The batches after a check are those without one, in the middle of an epoch too"
    res = []
    for check in False,True:
        set_seed(0)
        dl = make()
        learn = Learner(DataLoaders(dl, dl), small_model(), loss_func=ce()).remove_cb(ProgressCallback)
        if check: clean(learn.check_accumulation())
        batches = [b for b in dl]
        it = iter(dl); batches.append(next(it))
        if check: clean(learn.check_accumulation())
        if make is not workers: batches += list(it)
        res.append(batches)
    assert len(res[0])==len(res[1])>=3
    for a,b in zip(*res): assert all(map(torch.equal, a, b))

def test_bad_bs():
    for bs in (0, 1, True, '4', 2.):
        with pytest.raises(ValueError, match='check_accumulation: bs must be an int of at least 2, got'):
            learner().check_accumulation(bs)
    with pytest.raises(ValueError, match='has 1 sample, and at least 2'): learner(bs=1, n=1).check_accumulation()
    clean(learner(bs=1).check_accumulation())   # from several batches

def test_a_gradient_that_is_zero_or_not_finite():
    for loss in (lambda p,y: (p*math.nan).mean()),(lambda p,y: F.cross_entropy(p, y).clamp(max=1e-9)):
        with pytest.raises(ValueError, match='is zero or not finite'): learner(loss_func=loss).check_accumulation()

def test_a_setting_that_a_fit_would_refuse_has_a_cause():
    assert kinds(learner(net(Centre()), cbs=MicroBatch(4, exact=True)).check_accumulation())==['unknown']

def test_shown():
    check = learner(net(nn.BatchNorm1d(5)), loss_func=lambda p,y: masked(p, y)).check_accumulation()
    text,html = repr(check),check._repr_html_()
    for o in ('Nothing is wrong: your learner trains on whole batches. Micro-batches would not give the same',
              'batch norm', '-> MicroBatch(bs=4, exact=True)', '15 samples'): assert o in text
    assert html.count('<tr')==3 and '&lt;lambda&gt;' in html and 'color' not in html
    text = repr(learner().check_accumulation())
    for o in ('Nothing is wrong: your learner trains on whole batches. Micro-batches would give the same gradient',
              'Compared: one step on 15 samples of the first 3 training batches',
              'AccumulateStep(n_step=2) as an example'): assert o in text
    assert 'yours' not in text and 'could not' not in text   # nothing is left of a loss that is known
    text = repr(learner(cbs=AccumulateStep(2)).check_accumulation())
    assert 'The micro-batches give the same gradient' in text and 'relative error of the gradient' in text

def test_what_cannot_be_copied():
    class Locked(Callback):
        def __init__(self): self.f = threading.Lock()
        def after_backward(self):
            with self.f: nn.utils.clip_grad_value_(self.learn.model.parameters(), .01)
    assert found(learner(cbs=Locked()))==['callback']

def test_sizes_that_are_told():
    "The micro-batches have the learner's size if the samples allow it"
    check = learner(net(nn.BatchNorm1d(5)), cbs=AccumulateStep(4)).check_accumulation()
    assert '15 samples' in check.compared and 'in micro-batches of at most 8,' in check.compared
    check = learner(net(nn.BatchNorm1d(5)), bs=16, cbs=MicroBatch(4)).check_accumulation()
    assert 'at most 4,' in check.compared

class Block(nn.Module):
    def __init__(self, norm): super().__init__(); self.lin,self.norm,self.drop = nn.Linear(6,6),norm,nn.Dropout()
    def forward(self, x): return self.drop(self.norm(self.lin(x)).tanh())
def blocks(norm=nn.Identity): return nn.Sequential(*[Block(norm()) for _ in range(3)], nn.Linear(6,3)).double()

@each(cb=[GradientCheckpointing,OffloadActivations])
def test_whole_batches(cb):
    check = learner(blocks(lambda: nn.BatchNorm1d(6)), cbs=cb()).check_accumulation()
    assert not check.causes and check.error==0 and 'without and with' in check.compared, check
    assert check.title.startswith('Your callbacks give the same') and 'bit for bit' in check.title

def test_refused_remedies():
    "`exact=True` beside checkpointing: no line, but what its refusal says"
    cbs = AccumulateStep(2),GradientCheckpointing()
    check = learner(blocks(lambda: nn.BatchNorm1d(6)), cbs=cbs).check_accumulation()
    assert kinds(check)==['batch norm','dropout']
    for o in check.causes:
        assert 'exact=True and GradientCheckpointing cannot be combined' in o.remedy and 'MicroBatch(' not in o.remedy

# applications

words = 'one two three four five six seven eight nine ten red blue green good bad film day'.split()
def texts(n=32):
    r = random.Random(0)
    return pd.DataFrame(dict(text=[' '.join(r.choices(words, k=r.randint(3, 12))) for _ in range(n)]))

@pytest.mark.filterwarnings('ignore')
def test_texts():
    "A language model, before and after a fit; the loader shuffles in place"
    from fastai.text.all import AWD_LSTM,TextDataLoaders,awd_lstm_lm_config,language_model_learner
    small = dict(n_hid=12, emb_sz=6, n_layers=2)
    def batches(check):
        set_seed(0)
        dls = TextDataLoaders.from_df(texts(), text_col='text', is_lm=True, valid_pct=.25, bs=4, seq_len=6)
        learn = language_model_learner(dls, AWD_LSTM, pretrained=False,
                                       config={**awd_lstm_lm_config,**small}).remove_cb(ProgressCallback)
        if check: assert kinds(learn.check_accumulation())==['dropout']
        with learn.no_logging(): learn.fit(1)
        if check: assert kinds(learn.check_accumulation())==['dropout']
        return list(dls.train)
    for a,b in zip(batches(True), batches(False)): assert all(map(torch.equal, a, b))

def test_compiled():
    "A compiled model is checked without its compilation"
    model = net(nn.BatchNorm1d(5))
    learn = learner(torch.compile(model), cbs=AccumulateStep(2))
    check = learn.check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('batch norm','1')]
    model = net()
    model.compile(); model[0].compile()
    clean(learner(model).check_accumulation())

def test_checkpoints():
    "Modules that run again in the backward pass: in the model, and by a callback that is no cause"
    from torch.utils.checkpoint import checkpoint
    class Again(nn.Module):
        def __init__(self, reentrant):
            super().__init__(); self.m,self.reentrant = nn.Sequential(nn.Linear(6,5), nn.Dropout(), nn.Tanh()),reentrant
        def forward(self, x): return checkpoint(self.m, x.requires_grad_(), use_reentrant=self.reentrant)
    for reentrant in True,False:
        check = learner(nn.Sequential(Again(reentrant), nn.Linear(5,3)).double()).check_accumulation()
        assert [(o.kind,o.where) for o in check.causes]==[('dropout','0.m.1')]
    for last,found in (nn.Dropout(.2),['dropout']),(nn.BatchNorm1d(6),['batch norm']):
        blocks = [nn.Sequential(nn.Linear(6,6), nn.Tanh(), last) for _ in range(3)]
        model = nn.Sequential(*blocks, nn.Linear(6,3)).double()
        for saving in GradientCheckpointing(blocks),OffloadActivations():
            assert kinds(learner(model, cbs=[AccumulateStep(2), saving]).check_accumulation())==found

def test_many_samples_masked():
    "The check takes samples of the first batch that show the difference"
    y = torch.ones(64).long(); y[3] = 0
    learn = learner(loss_func=masked, y=1-y, shuffle=False)   # one target counts
    assert kinds(learn.check_accumulation())==['loss']
    learn = learner(loss_func=masked, y=torch.ones(64).long())
    clean(learn.check_accumulation())

def test_shared_and_own_attributes():
    "A module that a callback and the learner hold is that of the model in the copy too, and the user's is not run"
    class Penalty(Callback):
        def __init__(self, m): self.m = m
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + self.m.weight.square().mean()
    model = small_model()
    learn = learner(model, cbs=Penalty(model[0]))
    learn.head = model[2]
    clean(learn.check_accumulation())
    assert model[0].weight.grad is None

def test_draws_that_drop_nothing():
    "If two draws are the same by chance, the check draws again. The generators are still as before"
    learn = learner(net(nn.Dropout(1e-12)))
    before = state(learn)
    assert not learn.check_accumulation().causes
    assert_as_before(before, learn)

# ---- what a review broke

def found(learn, **kwargs): return [o.kind for o in learn.check_accumulation(**kwargs).causes]

def test_global_tensors():
    "Constants in float32, in a loss and in a model"
    w = torch.tensor([1.,2.,3.])
    check = learner(loss_func=lambda p,y: F.cross_entropy(p, y, weight=w)).check_accumulation()
    assert [o.kind for o in check.causes]==['loss'] and 'coupled=True' in check.causes[0].remedy

def test_eval_by_a_callback():
    "Norms that a callback has put into evaluation are no cause"
    assert found(learner(net(nn.BatchNorm1d(5), nn.Dropout()), cbs=BatchNormEval()))==['dropout']

class Stops(Callback):
    def before_step(self): raise CancelStepException
class Leaves(Callback):
    def after_backward(self): raise CancelBatchException

@each(cb=[Stops,Leaves])
def test_no_step(cb):
    with pytest.raises(ValueError, match='a callback cancels the step'): learner(cbs=cb()).check_accumulation()

@each(cb=[lambda: AccumulateStep(2), lambda: OffloadActivations(), noop])
def test_ignored_labels(cb):
    "All labels that are compared are ignored: 0/0, and no callback is to blame; one that counts is enough"
    def check(y):
        loss = CrossEntropyLossFlat(ignore_index=2)
        return learner(y=y, loss_func=loss, cbs=cb(), shuffle=False).check_accumulation()
    y = torch.full((64,), 2)
    with pytest.raises(ValueError, match='the loss ignores all'): check(y)
    y[0] = 1
    assert not check(y).causes

def test_one_line_for_both():
    "With batch norm and MixUp, one line is named for both"
    res = learner(net(nn.BatchNorm1d(5)), cbs=MixUp(), loss_func=CrossEntropyLossFlat()).check_accumulation()
    assert kinds(res)==['batch norm','augmentation']
    assert all('exact=True' in o.remedy for o in res.causes), res

def test_sparse_gradients():
    "Those of an `nn.Embedding(sparse=True)`, which the proof sees too"
    def make(cb):
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3))
        x = torch.randint(0, 9, (64,3))
        return learner(model, x=x, cbs=cb)
    assert found(make(AccumulateStep(2)))==['batch norm']
    learn = make(MicroBatch(3, exact=True))
    with warnings.catch_warnings():
        warnings.simplefilter('error')   # it would warn of a trial that failed
        learn.fit(1)
    assert learn.check_accumulation().error<=tol

def test_fastais_callback():
    from fastai.callback.training import GradientAccumulation
    with pytest.raises(ValueError, match='remove it with'): learner(cbs=GradientAccumulation(32)).check_accumulation()

def test_callback_that_draws_from_the_loader():
    class Draws(Callback):
        def before_fit(self): self.b = self.dls.one_batch()
    res = []
    for check in False,True:
        set_seed(0)
        learn = learner(cbs=Draws())
        if check: learn.check_accumulation()
        res.append([x for x,_ in learn.dls.train])
    assert rel(*res)[0]==0

@each(seed=range(8) if SWEEP else [0,5])
def test_hard_samples(seed):
    "A loss that takes the hardest samples of what it sees"
    set_seed(seed)
    def hardest(p, y): return F.cross_entropy(p, y, reduction='none').topk(max(1, len(p)//2)).values.mean()
    assert found(learner(loss_func=hardest))==['loss']

@each(seed=range(8) if SWEEP else [0,5])
def test_draws_of_python(seed):
    class Coin(nn.Module):
        def forward(self, x): return x if not self.training or random.random()<.5 else x*0
    learn = learner(net(Coin()))
    set_seed(seed)
    assert found(learn)==['dropout']

def test_draws_of_an_own_generator():
    "A generator of NumPy that the model holds is no dropout that can be switched off"
    class Coin(nn.Module):
        def __init__(self): super().__init__(); self.rng = np.random.default_rng(0)
        def forward(self, x): return x*self.rng.random()
    assert found(learner(net(Coin())))==['unknown']

def test_a_module_that_mixes_hides_the_loss():
    "Then the loss is not looked at; without the module, it is"
    assert found(learner(net(Centre()), masked))==['unknown']
    assert found(learner(net(), masked))==['loss']

def test_hooks_on_parameters():
    learn = learner(loss_func=lambda p,y: 20*F.cross_entropy(p, y))
    for p in learn.model.parameters(): p.register_hook(lambda g: g.clamp(-.01,.01))
    assert found(learn)

def test_predictions_without_rows():
    "Packed tokens, with the right weight and dropout: nothing else is a cause"
    class Packed(nn.Module):
        def __init__(self): super().__init__(); self.body = net(nn.Dropout())
        def forward(self, x): return self.body(x).repeat_interleave(2, 0)[1:]
    check = learner(Packed(), loss_func=lambda p,y: p.square().mean()).check_accumulation()
    assert 'dropout' in [o.kind for o in check.causes]

def test_too_few_for_batch_norm():
    "Batch norm refuses a micro-batch of one sample, so whole batches are compared"
    for bs in 2,3:
        check = learner(net(nn.BatchNorm1d(5))).check_accumulation(bs)
        assert kinds(check)==['batch norm'] and 'whole training batches' in check.compared

def test_sum_of_a_mean():
    check = learner(cbs=AccumulateStep(2, average=False)).check_accumulation()
    assert kinds(check)==['loss'] and 'average=False for a sum' in check.causes[0].remedy

def test_rounding_is_no_cause():
    "Thirty batch norms in a row amplify rounding until it is as large as the effect of a cause"
    deep = nn.Sequential(*(m for _ in range(30) for m in (nn.Linear(6,6), nn.BatchNorm1d(6), nn.ReLU())),
                         nn.Linear(6,3)).double()
    check = learner(deep, cbs=MicroBatch(4, exact=True)).check_accumulation()
    assert not check.causes and check.error>1e-14   # how much is left of it depends on the processor

def test_clip_beside_another_cause():
    class Clip(Callback):
        def after_backward(self): nn.utils.clip_grad_value_(self.model.parameters(), .2)
    assert found(learner(net(nn.Dropout()), loss_func=lambda p,y: 20*F.cross_entropy(p, y),
                         cbs=[AccumulateStep(2), Clip()]))==['dropout','callback']

@pytest.mark.skipif(not torch.cuda.is_available(), reason='checks a learner on a GPU, and this machine has none')
def test_check_on_a_gpu():
    "On the device of the learner, whose generator is put back"
    learn = learner(net(nn.BatchNorm1d(5), nn.Dropout()))
    learn.dls.device = 'cuda'
    state = torch.cuda.get_rng_state()
    check = learn.check_accumulation()
    assert 'on cuda' in check.compared and [o.kind for o in check.causes]==['batch norm','dropout']
    assert torch.equal(torch.cuda.get_rng_state(), state)

def test_callbacks_that_need_each_other():
    "Two callbacks that cannot run without each other; the check still answers"
    class Keeps(Callback):
        def before_batch(self): self.x = self.learn.xb[0]
    class Reads(Callback):
        def after_pred(self): assert self.learn.keeps.x is not None
    assert found(learner(net(nn.BatchNorm1d(5)), cbs=[AccumulateStep(2), Keeps(), Reads()]))==['batch norm']

def test_memory_of_the_check():
    "At most twice the parameters and gradients in float64, the remedies and the proof included; 1.2 here"
    def wide(n=6, d=200): return nn.Sequential(nn.Linear(6,d), *[nn.Linear(d,d) for _ in range(n)],
                                               nn.BatchNorm1d(d), nn.Linear(d,3)).double()
    learn = Learner(make_dls(64, 8), wide(), loss_func=ce(), opt_func=Adam).remove_cb(ProgressCallback)
    with learn.no_logging(): learn.recorder.smooth_loss = AvgSmoothLoss64(); learn.fit(1)
    own = 2*8*sum(p.numel() for p in learn.model.parameters())
    peak = peak_bytes(lambda: learn.check_accumulation())/own
    assert 1<=peak<=2, f'{peak:.2f} times the parameters and gradients'

@each(most=[9,3])
def test_goes_on_with_fewer_samples_if_memory_runs_out(most):
    class Greedy(nn.Linear):
        def forward(self, x):
            if len(x)>most: raise RuntimeError('CUDA out of memory. Tried to allocate')
            return super().forward(x)
    model = nn.Sequential(Greedy(6, 8), nn.Linear(8, 10))
    learn = make_learner(make_dls(64, 16), model=model.float(), cbs=AccumulateStep(4))
    if most<4:
        with pytest.raises(RuntimeError, match='out of memory'): learn.check_accumulation()
    else: assert 'one step on 7 samples' in learn.check_accumulation().compared
    assert learn.model[0].weight.dtype==torch.float32 and learn.model[0].weight.grad is None

# the setting that the learner has
def test_a_bs_that_cuts_nothing():
    check = learner(net(nn.BatchNorm1d(5)), cbs=MicroBatch(8)).check_accumulation()
    assert check.title.startswith('Nothing is wrong: your learner trains on whole batches, since the bs of MicroBatch')
    assert 'with MicroBatch(bs=4) as an example' in check.compared
    assert 'yours' not in repr(check) and check.causes[0].remedy.startswith('MicroBatch(bs=4, exact=True);')

def test_windows_of_exact_slices():
    "Batch norm sees the batch of the loader, not the window"
    cbs = AccumulateStep(2),MicroBatch(4, exact=True)
    assert found(learner(net(nn.BatchNorm1d(5)), bs=16, cbs=cbs))==['batch norm']

class Moves(nn.Module):
    "A buffer that depends on the number of samples, and that predictions do not show"
    def __init__(self): super().__init__(); self.lin = nn.Linear(6,3); self.register_buffer('n', torch.zeros(1))
    def forward(self, x):
        self.n += len(x)**.5
        return self.lin(x)

def test_a_setting_that_a_fit_refuses():
    "The gradient is the same, but a buffer is not"
    learn = learner(Moves().double(), cbs=MicroBatch(4, exact=True))
    says = 'exact=True is not possible: the model does something else with 4 samples'
    with pytest.raises(ValueError, match=says): learn.check_accumulation()
    with pytest.raises(ValueError, match=says): learn.fit(1)

def test_a_module_of_that_name():
    class GroupNorm(nn.BatchNorm1d): pass
    assert kinds(learner(net(GroupNorm(5)), cbs=AccumulateStep(2)).check_accumulation())==['batch norm']

def test_texts_longer_than_the_model_reads_at_once():
    "The refusal of a fit is named, which says what to pass"
    from fastai.text.all import TextDataLoaders,text_classifier_learner,AWD_LSTM,awd_lstm_clas_config
    df = pd.DataFrame(dict(text=['some words ']*8+['some more words '*10]*8, label=[*'xy']*8))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.25, bs=8, seq_len=10)
    learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, seq_len=10,
                                    config={**awd_lstm_clas_config, **dict(n_hid=12, emb_sz=6, n_layers=2)})
    causes = learn.remove_cb(ProgressCallback).check_accumulation().causes
    assert [o.kind for o in causes]==['batch norm','dropout']
    for o in causes: assert 'Pass seq_len=' in o.remedy and 'MicroBatch(' not in o.remedy

# samples of several batches
def padded_mean(p, y): return F.cross_entropy(p[y!=-100], y[y!=-100])

@each(lengths=[[1+i//6 for i in range(48)], [1+i//2%8 for i in range(48)], [7 if i==9 else 8 for i in range(48)]])
def test_what_differs_between_batches(lengths):
    "A mean over valid tokens, where the samples of the first batch are alike"
    x,y = torch.randint(0, 11, (48,8)),torch.randint(0, 5, (48,8))
    for o,n in zip(y, lengths): o[n:] = -100
    dl = DataLoader(list(zip(x, y)), bs=6)
    model = nn.Sequential(nn.Embedding(11,6), nn.Linear(6,5)).double()
    learn = Learner(DataLoaders(dl, dl), model, padded_mean, cbs=AccumulateStep(2)).remove_cb(ProgressCallback)
    cause, = learn.check_accumulation().causes
    assert cause.kind=='loss' and 'weight=lambda pred, *yb: (yb[0]!=-100).sum()' in cause.remedy

def test_says_what_it_could_not_compare():
    "Batches of other lengths"
    def loss(p, y): return F.cross_entropy(p[y!=-100], y[y!=-100])
    batches = [(features(6, 4)[:,:k], classes(6)) for k in (2,3,4)]
    dl = DataLoader([0,1,2], bs=None, create_batch=noop, create_item=lambda i: batches[i])
    model = nn.Sequential(Lambda(lambda x: x.mean(1, keepdim=True)), nn.Linear(1,3)).double()
    learn = Learner(DataLoaders(dl, dl), model, loss_func=loss, cbs=AccumulateStep(2)).remove_cb(ProgressCallback)
    said = learn.check_accumulation().compared
    assert 'of the first training batch' in said and 'only between batches could not be compared' in said

# what it refuses
@each(cbs=[None, MicroBatch(4, exact=True)])
def test_steps_in_the_backward_pass(cbs):
    def step(p):
        p.data -= .1*p.grad
        p.grad = None
    learn = learner(cbs=cbs)
    for p in learn.model.parameters(): p.register_post_accumulate_grad_hook(step)
    was = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(ValueError, match='hooks make it in the backward pass'): learn.check_accumulation()
    assert all(map(torch.equal, was, learn.model.parameters()))

def test_layers_without_a_size():
    learn = learner(nn.Sequential(nn.LazyLinear(5), nn.Linear(5,3)), cbs=AccumulateStep(2))
    with pytest.raises(ValueError, match="check_accumulation: the layer of '0.weight' has no size"):
        learn.check_accumulation()

def test_no_columns_of_numbers():
    "Parameters without elements, as `tabular_learner` with categories only has them"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.bn,self.lin = nn.BatchNorm1d(0),nn.Linear(6,3)
        def forward(self, x): return self.lin(x)
    clean(learner(Model().double(), cbs=MicroBatch(4, exact=True)).check_accumulation())

def test_time_that_is_left():
    "A line without a number of steps, which nobody knows"
    class ProgressCallback(Callback): pass
    out = io.StringIO()
    learn = learner(net(nn.BatchNorm1d(5)), cbs=[AccumulateStep(2), ProgressCallback()])
    with redirect_stdout(out): learn.check_accumulation()
    said = out.getvalue()
    assert 'The causes are looked for, about' in said and 's more' in said and 'step' not in said

def test_order_that_the_model_needs():
    "PyTorch's `pack_padded_sequence` wants the longest sample first, as in each batch of this loader"
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.lstm,self.out = nn.LSTM(2, 4, batch_first=True),nn.Linear(4,3)
        def forward(self, x):
            x = nn.utils.rnn.pack_padded_sequence(x, (x[...,0]!=0).sum(1).cpu(), batch_first=True)
            return self.out(self.lstm(x)[1][0][0])
    x = features(64, 12).view(64, 6, 2)
    for i,o in enumerate(x): o[6-i%8//2:] = 0
    model = Model().double()
    clean(learner(model, x=x, shuffle=False, cbs=AccumulateStep(2)).check_accumulation())
