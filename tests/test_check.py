"""`check_accumulation` on learners with known causes. It runs the learner's own step, each remedy that it names is
tried, and the learner stays as it was"""
import _thread,signal,time,warnings
import pytest
from harness import *
from fastai.vision.augment import RandTransform
from fastai.callback.mixup import MixUp
from fastai.callback.training import GradientClip
from fastai_accum.all import *
from fastai_accum.know.check import *
from fastai_accum.state import State
from fastai_accum.core import accumulation_settings
from torch.optim.lr_scheduler import ExponentialLR,OneCycleLR

tol = 1e-8   # rounding in float64 is smaller

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'benchmarks'))
from common import peak_bytes

@pytest.fixture(autouse=True)
def _seed():
    assert torch.get_default_dtype()==torch.float32   # or a test has left float64
    set_seed(0)

def net(*ms): return nn.Sequential(nn.Linear(6,5), *ms, nn.Tanh(), nn.Linear(5,3)).double()
def ce(): return nn.CrossEntropyLoss()
def learner(model=None, loss_func=None, cbs=None, y=None, bs=8, n=64, x=None, shuffle=True, cls=Learner, **kwargs):
    learn = cls(make_dls(n, bs, y=y, x=x, shuffle=shuffle), small_model() if model is None else model,
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

def kinds(check): return [o.kind for o in check.causes]
def clean(check):
    assert not check.causes and check.error<=1e-12, check
    return check

# what has no cause
def test_plain():
    "Also with losses that fastai rounds to float32, and a model in float32"
    for loss_func in nn.CrossEntropyLoss,CrossEntropyLossFlat,FocalLossFlat,LabelSmoothingCrossEntropyFlat:
        clean(learner(small_model().float(), loss_func(), x=features(64).float()).check_accumulation())

class Jacobian(nn.Module):
    "Adds the size of its own slope at each sample, as contractive and physics-informed models do"
    def __init__(self): super().__init__(); self.inner = net()
    def forward(self, x):
        slope = torch.func.vmap(torch.func.jacrev(self.inner))(x)
        return self.inner(x)+slope.pow(2).sum((1,2))[:,None]

class NoColumns(nn.Module):
    "Has parameters without elements, as `tabular_learner` with categories only"
    def __init__(self): super().__init__(); self.bn,self.lin = nn.BatchNorm1d(0),nn.Linear(6,3)
    def forward(self, x): return self.lin(x)

def test_clean_settings():
    for cbs in (AccumulateStep(n_samples=24), MicroBatch(), [AccumulateStep(2), MicroBatch(4)], GradientClip(.1),
                [AccumulateStep(n_samples=16), MicroBatch(4)], [AccumulateStep(2), GradAccumDtype()]):
        clean(learner(cbs=cbs).check_accumulation())
    clean(learner(loss_func=contrastive, cbs=MicroBatch(4, coupled=True)).check_accumulation())
    exact = MicroBatch(4, exact=True)
    clean(learner(net(nn.BatchNorm1d(5), nn.Dropout()), rmse, exact, targets()).check_accumulation())
    clean(learner(NoColumns().double(), cbs=MicroBatch(4, exact=True)).check_accumulation())
    for cbs in None,MicroBatch(4): clean(learner(Jacobian(), cbs=cbs).check_accumulation())

@each(way=['coupled','exact'])
def test_own_setting_that_cannot_work(way):
    "The check says what the fit says, which is not PyTorch's error alone"
    check = learner(Jacobian(), cbs=MicroBatch(4, **{way:True})).check_accumulation
    with pytest.raises(ValueError, match=f'{way}=True is not possible.*saved tensor hooks.*in its place'): check()

def test_sizes():
    "The last micro-batch is smaller, unless it would have one sample only"
    for bs,n,size in (2,2,1),(3,3,1),(4,4,2),(5,4,2),(6,5,3),(8,7,4),(100,63,8):
        compared = clean(learner().check_accumulation(bs)).compared
        assert f'{n} samples' in compared and f'micro-batches of at most {size}' in compared, bs
    for bs,cbs,size in (8,AccumulateStep(4),8),(16,MicroBatch(4),4):   # that of the learner, if the samples allow it
        assert f'at most {size},' in learner(net(nn.BatchNorm1d(5)), bs=bs, cbs=cbs).check_accumulation().compared

def test_patch():
    "Its settings are what is checked, and stay"
    learn = learner(loss_func=masked)
    with accumulation(4):
        assert kinds(learn.check_accumulation())==['loss'] and accumulation_settings()==dict(n_step=4)
    with accumulation(4, weight=lambda p,y: (y!=0).sum()): clean(learn.check_accumulation())
    assert kinds(learn.check_accumulation())==['loss'] and accumulation_settings() is None

# causes
def no_bias():
    bn = nn.BatchNorm1d(5)
    bn.register_parameter('bias', None)
    return bn
class GroupNorm(nn.BatchNorm1d): pass
class Ranks(Learner):
    def _do_grad_opt(self):
        self.loss_grad = self.loss_grad**2
        super()._do_grad_opt()
def clamped():
    learn = learner(loss_func=lambda p,y: 20*F.cross_entropy(p, y))
    for p in learn.model.parameters(): p.register_hook(lambda g: g.clamp(-.01,.01))
    return learn
global_weights = torch.tensor([1.,2.,3.])

cases = dict(
    norm=(lambda: learner(net(nn.BatchNorm1d(5))), {'batch norm':'1'}),
    norm_without_bias=(lambda: learner(net(no_bias())), {'batch norm':'1'}),
    norm_of_another_name=(lambda: learner(net(GroupNorm(5)), cbs=AccumulateStep(2)), {'batch norm':'1'}),
    dropout=(lambda: learner(net(nn.Dropout(.3))), {'dropout':'1'}),
    rmse=(lambda: learner(loss_func=rmse, y=targets()), {'loss':'rmse'}),
    masked=(lambda: learner(loss_func=masked), {'loss':'masked'}),
    contrastive=(lambda: learner(loss_func=contrastive), {'loss':'contrastive'}),
    sum=(lambda: learner(loss_func=nn.CrossEntropyLoss(reduction='sum')), {'loss':'CrossEntropyLoss'}),
    float32=(lambda: learner(loss_func=lambda p,y: F.cross_entropy(p, y, weight=global_weights)), {'loss':'<lambda>'}),
    mixup=(lambda: learner(loss_func=CrossEntropyLossFlat(), cbs=MixUp()), {'augmentation':'MixUp'}),
    mixup_and_norm=(lambda: learner(net(nn.BatchNorm1d(5)), CrossEntropyLossFlat(), MixUp()),
                    {'batch norm':'1', 'augmentation':'MixUp'}),
    clip=(lambda: learner(cbs=ClipValues()), {'callback':'ClipValues'}),
    two_of_three=(lambda: learner(loss_func=CrossEntropyLossFlat(), cbs=[ClipValues(), GradientClip(.1), MixUp()]),
                  {'callback':'ClipValues', 'augmentation':'MixUp'}),
    centre=(lambda: learner(net(Centre())), {'unknown':'1'}),
    centre_hides_the_loss=(lambda: learner(net(Centre()), masked), {'unknown':'1'}),
    several=(lambda: learner(net(nn.BatchNorm1d(5), nn.Dropout()), rmse, y=targets()),
             {'batch norm':'1', 'dropout':'2', 'loss':'rmse'}),
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
    "It names the module in which it begins"
    class Root(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(6,5),nn.Linear(5,3)
        def forward(self, x): x = self.a(x).tanh(); return self.b(x-x.mean(0))
    check = learner(Root().double()).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('unknown','Root')]
    assert kinds(clamped().check_accumulation())
    cause, = learner(cls=Ranks).check_accumulation().causes
    assert cause.kind=='unknown' and 'coupled=True' in cause.remedy
    assert kinds(learner(net(Centre()), cbs=MicroBatch(4, exact=True)).check_accumulation())==['unknown']

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
    check = learner(cbs=AccumulateStep(2, weight=lambda p,y: 1+(y!=0).sum())).check_accumulation()
    assert kinds(check)==['loss']   # a wrong one
    check = learner(cbs=AccumulateStep(2, average=False)).check_accumulation()
    assert kinds(check)==['loss'] and 'average=False for a sum' in check.causes[0].remedy

# batches

def batches_learner(items, model, loss_func, n_inp, cbs=None, shuffle=True):
    dls = DataLoaders(DataLoader(items, bs=8, shuffle=shuffle), DataLoader(items, bs=8))
    dls.n_inp = n_inp
    return Learner(dls, model.double(), loss_func=loss_func, cbs=cbs).remove_cb(ProgressCallback)

def test_dictionaries():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.net = net(nn.BatchNorm1d(5))
        def forward(self, b): return dict(logits=self.net(b['x']), more=b['x'])
    items = [(dict(x=x), dict(y=y, mask=(y>0).double())) for x,y in zip(features(32), classes(32))]
    def loss(p, t): return (F.cross_entropy(p['logits'], t['y'], reduction='none')*t['mask']).sum()/t['mask'].sum()
    check = batches_learner(items, Model(), loss, 1).check_accumulation()
    assert {o.kind:o.where for o in check.causes}=={'batch norm':'net.1', 'loss':'loss'}
    assert 'exact=True' in check.causes[0].remedy

# as before
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
    total,before,was = n,left(learn),signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for at in 1, total//2, total-1, total:
            n = 0
            with pytest.raises(KeyboardInterrupt): learn.check_accumulation()
            assert_left(before, learn)
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

def of_fastai(): return DataLoader(Draws(), bs=8, shuffle=True, num_workers=0)
def augmented():
    class Noise(RandTransform):
        def encodes(self, x:TensorBase): return x+torch.randn_like(x)
    return TfmdDL(TfmdLists(list(range(32)), [lambda i: (TensorBase(features(32)[i]), TensorCategory(classes(32)[i]))]),
                  bs=8, shuffle=True, after_batch=[Noise()], num_workers=0)
def with_sampler():
    sampler = torch.utils.data.WeightedRandomSampler(torch.rand(32), 32, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(Draws(), batch_size=8, sampler=sampler)
def with_workers():
    items = list(zip(features(32), classes(32)))
    return torch.utils.data.DataLoader(items, batch_size=8, shuffle=True, num_workers=1, timeout=9)

@pytest.mark.parametrize('make', [of_fastai,augmented,with_sampler,with_workers], ids=lambda o: o.__name__)
def test_loaders(make):
    "The batches after a check are those without one, in the middle of an epoch too"
    res = []
    for check in False,True:
        set_seed(0)
        dl = make()
        learn = Learner(DataLoaders(dl, dl), small_model(), loss_func=ce()).remove_cb(ProgressCallback)
        if check: clean(learn.check_accumulation())
        batches,it = list(dl),iter(dl)
        batches.append(next(it))
        if check: clean(learn.check_accumulation())
        res.append([*batches, *it])
    assert len(res[0])==len(res[1])==8
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
    for saving in GradientCheckpointing(),OffloadActivations():
        assert found(learner(blocks(), cbs=[AccumulateStep(2), saving]))==['dropout']

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
    before = left(learn)
    assert not learn.check_accumulation().causes
    assert_left(before, learn)

# ---- what a review broke

def found(learn, **kwargs): return [o.kind for o in learn.check_accumulation(**kwargs).causes]

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

@each(seed=range(8) if SWEEP else [0,5])
def test_draws_of_python(seed):
    class Coin(nn.Module):
        def forward(self, x): return x if not self.training or random.random()<.5 else x*0
    learn = learner(net(Coin()))
    set_seed(seed)
    assert found(learn)==['dropout']

def test_an_own_generator():
    "Of NumPy, which the model holds, is no dropout that can be switched off"
    class Coin(nn.Module):
        def __init__(self): super().__init__(); self.rng = np.random.default_rng(0)
        def forward(self, x): return x*self.rng.random()
    assert found(learner(net(Coin())))==['unknown']

def test_too_few_for_batch_norm():
    "Batch norm refuses a micro-batch of one sample, so whole batches are compared"
    for bs in 2,3:
        check = learner(net(nn.BatchNorm1d(5))).check_accumulation(bs)
        assert kinds(check)==['batch norm'] and 'whole training batches' in check.compared

def test_rounding_is_no_cause():
    "Thirty batch norms in a row amplify rounding until it is as large as the effect of a cause"
    deep = nn.Sequential(*(m for _ in range(30) for m in (nn.Linear(6,6), nn.BatchNorm1d(6), nn.ReLU())),
                         nn.Linear(6,3)).double()
    check = learner(deep, cbs=MicroBatch(4, exact=True)).check_accumulation()
    assert not check.causes and check.error>1e-14   # how much is left of it depends on the processor

@pytest.mark.skipif(not torch.cuda.is_available(), reason='checks a learner on a GPU, and this machine has none')
def test_check_on_a_gpu():
    "On the device of the learner, whose generator is put back"
    learn = learner(net(nn.BatchNorm1d(5), nn.Dropout()))
    learn.dls.device = 'cuda'
    state = torch.cuda.get_rng_state()
    check = learn.check_accumulation()
    assert 'on cuda' in check.compared and [o.kind for o in check.causes]==['batch norm','dropout']
    assert torch.equal(torch.cuda.get_rng_state(), state)

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

class Moves(nn.Module):
    "A buffer that depends on the number of samples, and that predictions do not show"
    def __init__(self): super().__init__(); self.lin = nn.Linear(6,3); self.register_buffer('n', torch.zeros(1))
    def forward(self, x):
        self.n += len(x)**.5
        return self.lin(x)

def test_a_setting_that_a_fit_refuses():
    "The gradient is the same, but a buffer is not"
    learn = learner(Moves().double(), cbs=MicroBatch(4, exact=True))
    says = 'exact=True is not possible: .*leaves something else behind: model.n'
    with pytest.raises(ValueError, match=says): learn.check_accumulation()
    with pytest.raises(ValueError, match=says): learn.fit(1)

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

# the learner's own step: its backward pass, its optimizer, its callbacks, its loss, and the batches of its loader

def in_order(*cbs, cls=Learner, bs=4, loss=None, n=64, x=None, y=None, model=None, opt=SGD, n_inp=None, **kwargs):
    x,y = features(n) if x is None else x, classes(n) if y is None else y
    dls = DataLoaders(*[DataLoader(list(zip(x, *tuplify(y))), bs=bs, **kwargs) for _ in range(2)])
    if n_inp:
        for dl in dls.loaders: dl.n_inp = n_inp
    learn = cls(dls, model or small_model(), loss_func=loss or ce(), cbs=cbs, opt_func=opt, lr=.1)
    learn.recorder.smooth_loss = AvgSmoothLoss64()
    return learn.remove_cb(ProgressCallback)

def trained(learn, n=2):
    set_seed(5)
    with learn.no_logging(): learn.fit(n)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

class Assigned(Learner):
    def _backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad, ps)): p.grad = g.clone()
class Clipped(Learner):
    def _backward(self):
        super()._backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), .01)
class Normalised(Learner):
    def _backward(self):
        ps = list(self.model.parameters())
        gs = torch.autograd.grad(self.loss_grad, ps)
        size = torch.stack([g.norm() for g in gs]).norm()
        for p,g in zip(ps, gs): p.grad = g/size if p.grad is None else p.grad+g/size
class Added(Learner):
    "Adds the gradient, so it is exact"
    def _backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad, ps)): p.grad = g.clone() if p.grad is None else p.grad+g

@pytest.mark.parametrize('cls', [Assigned,Clipped,Normalised])
def test_finds_a_backward_pass_of_ones_own(cls):
    "It says what the training does, and `coupled=True`, which it names, trains as the large batch does"
    large = trained(in_order(cls=cls, bs=16))
    assert rel(trained(in_order(AccumulateStep(4), cls=cls)), large)[0]>1e-6
    check = in_order(AccumulateStep(4), cls=cls).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('backward',cls.__name__)]
    assert 'coupled=True' in check.causes[0].remedy and 'add to the gradients' in check.causes[0].remedy
    close(trained(in_order(MicroBatch(4, coupled=True), cls=cls, bs=16)), large)

def test_a_backward_pass_that_adds_is_right():
    clean(in_order(AccumulateStep(4), cls=Added).check_accumulation())
    close(trained(in_order(AccumulateStep(4), cls=Added)), trained(in_order(cls=Added, bs=16)))
    check = in_order(AccumulateStep(4), cls=Assigned, model=net(nn.BatchNorm1d(5), nn.Dropout())).check_accumulation()
    assert kinds(check)==['batch norm','dropout','backward']

def hardest(p, y): return F.cross_entropy(p, y, reduction='none').topk(max(1, len(y)//2)).values.mean()
def above(p, y):
    l = F.cross_entropy(p, y, reduction='none')
    return l[l>1.1].sum()/(l>1.1).sum().clamp(min=1)

# of two samples, the harder ones may be those of all, by luck
@drawn(4, loss=[hardest,above,masked], bs=[3,4], seed=[0,1])
def test_small_batches(loss, bs, seed):
    "Samples come from as many batches as it takes"
    data = dict(x=features(64, seed=seed+10), y=classes(64, seed=seed+20))
    assert found(in_order(AccumulateStep(4), loss=loss, bs=bs, **data))==['loss']
    assert not found(in_order(AccumulateStep(4), bs=bs))

def several(os): return torch.stack([o[0] for o in os]),torch.cat([o[1] for o in os]),torch.stack([o[2] for o in os])
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f,self.h = nn.Sequential(*[nn.Sequential(nn.Linear(6,6), nn.Tanh()) for _ in range(4)]),nn.Linear(6,3)
    def forward(self, x, u): return self.h(self.f(x)),self.h(self.f(u))
def unlabelled(*cbs, k=7, loss=lambda p: p.pow(2).mean(), **kwargs):
    "Each sample comes with `k` rows without a label"
    torch.manual_seed(0)
    def both(p, y): return F.cross_entropy(p[0], y)+loss(p[1].softmax(1))
    return in_order(*cbs, x=features(40), y=(features(40, k*6).view(40, k, 6),classes(40)), n_inp=2, loss=both,
                    create_batch=several, model=Two().double(), **kwargs)

@drawn(2, cb=[GradientCheckpointing,OffloadActivations], k=[2,7])
def test_what_does_not_cut_needs_no_cut(cb, k, capsys):
    a,b = (trained(unlabelled(*cbs, bs=16, k=k)) for cbs in ((),(cb(),)))
    assert torch.equal(a, b)
    check = unlabelled(cb(), bs=16, k=k).check_accumulation()
    assert check.error==0 and not check.causes

@each(k=[2,7])
def test_batches_that_cannot_be_cut(k):
    "They are compared as they are with the large one that the loader makes of the same samples"
    check = clean(unlabelled(AccumulateStep(2), k=k).check_accumulation())
    assert 'the batch that the loader makes of them' in check.compared
    close(trained(unlabelled(AccumulateStep(2), k=k)), trained(unlabelled(bs=8, k=k)))
    assert found(unlabelled(AccumulateStep(2), loss=lambda p: p.pow(2).mean().sqrt()))==['loss']

def triplets(p, y):
    a,b,c = p.view(-1, 3, p.shape[1]).unbind(1)
    return F.relu((a-b).pow(2).sum(1)-(a-c).pow(2).sum(1)+1).mean()
def pairs(p, y): return (p[::2]-p[1::2]).pow(2).mean()
def halves_in_turn(os): return torch.stack([o[0] for o in os]+[2*o[0] for o in os]),torch.stack([o[1] for o in os])
def both_halves(p, y):
    a,b = p.chunk(2)
    return (a-b).pow(2).mean()+F.cross_entropy(a, y)

@each(case=[(triplets,6,{}), (pairs,4,{}), (both_halves,4,dict(create_batch=halves_in_turn))])
def test_rows_that_belong_together(case):
    "Windows of whole batches are exact, and the check says so"
    loss,bs,kw = case
    def make(*cbs, bs=bs): return in_order(*cbs, loss=loss, bs=bs, n=72, **kw)
    close(trained(make(AccumulateStep(2))), trained(make(bs=2*bs)))
    clean(make(AccumulateStep(2)).check_accumulation())

def test_the_learners_own_error():
    "If the learner takes no samples at all, its own error comes, with the name of the check"
    def loss(p, y): raise RuntimeError('no such thing')
    learn = in_order(AccumulateStep(2), loss=loss)
    with pytest.raises(RuntimeError, match='no such thing') as e: learn.check_accumulation()
    assert 'check_accumulation' in ' '.join(e.value.__notes__)

class Scheduled(Callback):
    order,run_valid = 60,False
    def __init__(self, cycles): self.cycles = cycles
    def before_fit(self):
        opt,n = self.opt.opt,self.learn.n_steps(self.n_epoch)
        self.s = OneCycleLR(opt, max_lr=.1, total_steps=n) if self.cycles else ExponentialLR(opt, .9)
    def after_batch(self): self.s.step()

@drawn(3, cycles=[True,False], fitted=[False,True], opt=[torch.optim.AdamW,torch.optim.SGD])
def test_a_scheduler_of_pytorch(cycles, fitted, opt):
    "It finds the learner's own optimizer, which is as before afterwards, its groups and its state too"
    learn,plain = (in_order(Scheduled(cycles), AccumulateStep(4), opt=partial(OptimWrapper, opt=opt)) for _ in range(2))
    if fitted:
        for o in learn,plain: trained(o, 1)
    clean(learn.check_accumulation())
    assert torch.equal(trained(learn), trained(plain))

groups = dict(
    hyper    = lambda opt: opt.set_hyper('lr', .5),
    replaced = lambda opt: setattr(opt.opt, 'param_groups', [dict(g, lr=.5) for g in opt.opt.param_groups]),
    in_place = lambda opt: opt.opt.param_groups[0].update(lr=.5),
    added    = lambda opt: opt.opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))], lr=.5)),
    taken    = lambda opt: opt.opt.param_groups[0]['params'].pop(0))

@drawn(5, how=groups, fitted=[False,True])
def test_groups_that_a_callback_sets(how, fitted):
    "In `before_fit`"
    learn = in_order(AccumulateStep(4), opt=partial(OptimWrapper, opt=torch.optim.SGD))
    if fitted: trained(learn, 1)
    else: learn.create_opt()
    def now(): return [(id(g), list(map(id, g['params'])), {k:v for k,v in g.items() if k!='params'})
                       for g in learn.opt.opt.param_groups]
    was = now()
    def set_groups(cb): groups[how](cb.learn.opt)
    learn.add_cb(Callback(before_fit=set_groups)).check_accumulation()
    assert now()==was

class Method(Callback):
    def before_fit(self): self.learn.loss_func = self.mean
    def mean(self, p, y): return masked(p, y)

def test_a_loss_that_a_callback_sets():
    def sets(cb): cb.learn.loss_func = masked
    for cb in Callback(before_fit=sets),Method():
        check = in_order(cb, AccumulateStep(2), bs=8).check_accumulation()
        assert kinds(check)==['loss'] and 'rewrite' not in str(check), check

class DrawsInBatch(Callback):
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.xb = (self.xb[0]*self.f(),)

@each(f=[lambda: np.random.uniform(.5, 1.5), lambda: random.uniform(.5, 1.5), lambda: torch.rand(1).item()+.5])
def test_draws_in_a_callback(f):
    "They are found at the callback, and are no dropout"
    check = in_order(DrawsInBatch(f), AccumulateStep(2), bs=8).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('augmentation','DrawsInBatch')]

def test_says_no_size_that_has_nothing_to_do_with_it():
    "Exact slices, and a module that looks at the batch though it is no batch norm"
    check = in_order(MicroBatch(4, exact=True), model=net(Centre(), nn.BatchNorm1d(5)), bs=16).check_accumulation()
    assert 'unknown' in kinds(check) and 'yours' not in str(check)

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
