"`turn_on_accumulation`: every learner, every way to train, and fastai as it was afterwards"
import gc,importlib,pytest,sys,weakref,zipfile
from functools import wraps
from harness import *
from fastai_accum.patch import *

def state(): return {k:v for k,v in vars(Learner).items()},dict(vars(defaults))

@pytest.fixture(autouse=True)
def restores():
    "Whatever a test does, turning off restores the same objects"
    before = state()
    yield
    turn_off_accumulation()
    (a,da),(b,db) = before,state()
    assert {k for k in {*a,*b} if a.get(k) is not b.get(k)}==set() and da==db

fits = dict(fit=Self.fit(2), one_cycle=Self.fit_one_cycle(2), flat_cos=Self.fit_flat_cos(2), sgdr=Self.fit_sgdr(2, 1),
            fine_tune=Self.fine_tune(2, base_lr=0.02), positional=Self.fit(2, 0.01, 0.1, None, True, 1), lr_find=Self.lr_find(num_it=24, show_plot=False))
settings = dict(n_step=(dict(n_step=4), 8), n_samples=(dict(n_samples=64), 24), drop_last=(dict(n_step=4, drop_last=True), 8))

@pytest.mark.parametrize('existing', [True, False])
@pytest.mark.parametrize('how', settings)
@pytest.mark.parametrize('fit', fits)
def test_fits(fit, how, existing, tmp_path):
    "Learners that exist and those made later, in every way to train"
    kw,bs = settings[how]
    n,large = dict(n_step=(92,32), n_samples=(200,72), drop_last=(100,32))[how]
    make = lambda bs, drop=False: make_learner(make_dls(n, bs, drop_last=drop, shuffle=False), path=tmp_path)
    if existing: a = make(bs)
    turn_on_accumulation(**kw)
    if not existing: a = make(bs)
    fits[fit](a)
    turn_off_accumulation()
    b = make(large, drop='drop_last' in kw)
    fits[fit](b)
    assert_same(a, b)
    assert a.accumulate_step.learn is None and 0<a.accumulate_step.counts.n_steps<=len(a.spy.steps) and list(a.cbs.map(type))==list(b.cbs.map(type))

def test_off_is_plain():
    "After turning off, the same learner trains as one that never accumulated"
    a,b = (make_learner(make_dls(76, 8, shuffle=False)) for _ in range(2))
    turn_on_accumulation(4); a.fit(1); turn_off_accumulation()
    b.fit(1); b.model.load_state_dict(a.model.state_dict()); b.opt.load_state_dict(deepcopy(a.opt.state_dict()))
    for l in (a,b): l.spy.steps = []; l.fit(1)
    assert_same(a, b)
    assert len(b.spy.steps)==10

def steps(learn, **kwargs): learn.spy.steps = []; learn.fit(1, **kwargs); return len(learn.spy.steps)

def test_rank():
    "The learner's own or that of the call, then the innermost block, then what was turned on"
    make = lambda cbs=None: make_learner(make_dls(96, 8), cbs=cbs)
    turn_on_accumulation(2)
    assert steps(make())==6
    with accumulation(3):
        assert steps(make())==4
        with accumulation(n_samples=32): assert steps(make())==3
        assert steps(make())==4
        own = make(AccumulateStep(6))
        assert steps(own)==2 and own.accumulate_step.n_step==6
        assert steps(make(AccumulateStep(1)))==12 and steps(make().accumulate(12))==1
        for cbs in AccumulateStep(6), [AccumulateStep(6)], L(AccumulateStep(6)): assert steps(make(), cbs=cbs)==2
        with pytest.raises(ValueError, match='give either n_step'): steps(make(), cbs=AccumulateStep)   # a class is made without arguments
    assert steps(make())==6
    turn_off_accumulation()
    assert steps(make())==12

def test_callers_list_is_left_alone():
    cbs = L(Callback())
    with accumulation(4): make_learner(make_dls(96, 8)).fit(1, cbs=cbs)
    assert len(cbs)==1

def test_on_and_off():
    old = Learner.fit
    turn_off_accumulation(); turn_off_accumulation()
    assert Learner.fit is old
    turn_on_accumulation(4); turn_on_accumulation(n_samples=8)
    assert defaults.accumulation.settings==dict(n_samples=8) and Learner.fit.__wrapped__ is old
    turn_off_accumulation()
    assert Learner.fit is old and not hasattr(defaults, 'accumulation')

def test_block():
    "Restores on an exception, also what was changed inside"
    old = Learner.fit
    with pytest.raises(KeyError), accumulation(4): raise KeyError
    assert Learner.fit is old
    with accumulation(4): turn_off_accumulation()
    assert Learner.fit is old
    turn_on_accumulation(2)
    with accumulation(4): turn_on_accumulation(8)
    assert defaults.accumulation.settings==dict(n_step=2)
    @accumulation(n_step=5)
    def f(): return defaults.accumulation.settings['n_step']
    assert f()==f()==5 and defaults.accumulation.settings==dict(n_step=2)

bad = [dict(), dict(n_step=0), dict(n_step=4, n_samples=8), dict(n_step=4, drop_last=1), dict(n_step=4, weight=3), dict(n_step=4, n_steps=4)]
@pytest.mark.parametrize('kw', bad, ids=str)
def test_bad_arguments(kw):
    "The error names the argument, and what was on stays on"
    turn_on_accumulation(4); fit = Learner.fit
    for f in turn_on_accumulation,lambda **kw: accumulation(**kw).__enter__():
        with pytest.raises((ValueError,TypeError), match=list(kw)[-1] if kw else 'give n_step'): f(**kw)
    assert Learner.fit is fit and defaults.accumulation.settings==dict(n_step=4)

def test_refuses_fastais():
    learn = make_learner(make_dls(96, 8), cbs=GradientAccumulation(32))
    with accumulation(4), pytest.raises(ValueError, match='remove_cb.GradientAccumulation'): learn.fit(1)
    assert not hasattr(learn, 'accumulate_step')

def test_reload():
    "Turned on by one copy of the module, turned off by another; a callback of an old copy is still the learner's own"
    old,accumulate = Learner.fit,Learner.accumulate
    saved = {k:v for k,v in sys.modules.items() if k.startswith('fastai_accum')}
    try:
        turn_on_accumulation(4)
        for k in saved: del sys.modules[k]
        new = importlib.import_module('fastai_accum.patch')
        assert new.AccumulateStep is not AccumulateStep
        learn = make_learner(make_dls(96, 8), cbs=AccumulateStep(6))
        new.turn_on_accumulation(2)
        assert steps(learn)==2 and steps(make_learner(make_dls(96, 8)))==6
        new.turn_off_accumulation()
        assert Learner.fit is old
        turn_on_accumulation(4); importlib.reload(new); new.turn_off_accumulation()
        assert Learner.fit is old
        assert steps(learn.accumulate(4))==3   # replaces the callback of the old copy
        with pytest.raises(ValueError, match='have this callback 2 times'): learn.fit(1, cbs=AccumulateStep(2))
    finally:
        sys.modules.update(saved)
        Learner.accumulate = accumulate
        if hasattr(Learner, '_orig_accumulate'): del Learner._orig_accumulate   # where fastcore's `patch` keeps what it replaces

def test_wrapped_by_others():
    "Another library wraps `Learner.fit` on top: its wrapper stays, and ours does nothing any more"
    fit = Learner.fit
    turn_on_accumulation(4)
    ours,calls = Learner.fit,[]
    @wraps(ours)
    def other(self, *args, **kwargs): calls.append(1); return ours(self, *args, **kwargs)
    Learner.fit = other
    try:
        learn = make_learner(make_dls(96, 8))
        assert steps(learn)==3
        turn_off_accumulation()
        assert Learner.fit is other and steps(learn)==12
        turn_on_accumulation(2)
        assert steps(learn)==6 and len(calls)==3
        turn_off_accumulation()
        assert Learner.fit is other
    finally: Learner.fit = fit

def test_learners_are_freed():
    with accumulation(4):
        learn = make_learner(make_dls(96, 8)); learn.fit(1)
        ref = weakref.ref(learn)
        del learn; gc.collect()
    assert ref() is None

def test_running_fit_keeps_its_setting():
    learn = make_learner(make_dls(96, 8))
    turn_on_accumulation(4)
    learn.fit(2, cbs=Callback(after_epoch=lambda cb: turn_off_accumulation()))
    assert len(learn.spy.steps)==6 and Learner.fit.__name__=='fit' and not hasattr(Learner.fit, '__wrapped__')

def test_subclass():
    "A subclass with a `fit` of its own that calls fastai's"
    class Mine(Learner):
        def fit(self, *args, **kwargs): return super().fit(*args, **kwargs)
    learn = Mine(make_dls(96, 8), small_model(), loss_func=nn.CrossEntropyLoss(), cbs=Spy()); learn.logger = noop
    learn.remove_cbs([ProgressCallback, Recorder])
    with accumulation(4): assert steps(learn)==3

def test_exported_while_on(tmp_path):
    "Nothing of the library is in the file: it loads where fastai_accum is not installed"
    learn = make_learner(make_dls(96, 8), splitter=trainable_params, path=tmp_path)
    learn.remove_cb(Spy); learn.logger = print
    with accumulation(4): learn.fit(1); learn.recorder.smooth_loss = AvgSmoothLoss(); learn.export('a.pkl')
    names = zipfile.ZipFile(tmp_path/'a.pkl')
    assert not any(b'fastai_accum' in names.read(o) for o in names.namelist())
