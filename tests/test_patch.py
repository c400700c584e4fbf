"`turn_on_accumulation`: every learner, every way to train, and fastai as it was afterwards"
from functools import wraps
from harness import *
from fastai_accum.core import accumulation_settings

@pytest.fixture(autouse=True)
def turned_off():
    yield
    turn_off_accumulation()

@each(existing=[True,False])
def test_learners_that_exist_and_those_made_later(existing):
    "And a fit that begins later; `test_windows` has each way to train, and `test_lr_find` the search"
    def learner(bs): return make_learner(make_dls(92, bs, shuffle=False))
    if existing: a = learner(8)
    turn_on_accumulation(4)
    if not existing: a = learner(8)
    a.fit(2, .01, .1, None, True, 1)
    turn_off_accumulation()
    b = learner(32)
    b.fit(2, .01, .1, None, True, 1)
    assert_same(a, b)

def make(n=96, **kwargs): return make_learner(make_dls(n, 8), **kwargs)
def steps(learn, **kwargs): learn.spy.steps = []; learn.fit(1, **kwargs); return len(learn.spy.steps)
def n_step(): return accumulation_settings() and accumulation_settings()['n_step']

def test_rank():
    "The page shows more: a block that counts samples, and all that `fit` takes"
    turn_on_accumulation(2)
    with accumulation(3):
        with accumulation(n_samples=32): assert steps(make())==3
        for cbs in [AccumulateStep(6)], iter([AccumulateStep(6)]): assert steps(make(), cbs=cbs)==2
        # a class is made without arguments
        with pytest.raises(ValueError, match='give either n_step'): steps(make(), cbs=AccumulateStep)
    turn_on_accumulation(n_samples=16)
    cbs = L(Callback())
    assert steps(make(), cbs=cbs)==6 and len(cbs)==1
    turn_off_accumulation(); turn_off_accumulation()
    assert steps(make())==12

def test_block():
    "Goes back to the earlier setting, whatever was changed inside"
    with accumulation(4): turn_off_accumulation()
    assert n_step() is None
    turn_on_accumulation(2)
    with accumulation(4): turn_on_accumulation(8)
    assert n_step()==2
    @accumulation(n_step=5)
    def f(): return n_step()
    assert f()==f()==5 and n_step()==2

def test_running_fit_keeps_its_setting():
    learn = make()
    turn_on_accumulation(4)
    learn.fit(2, cbs=Callback(after_epoch=lambda cb: turn_off_accumulation()))
    assert len(learn.spy.steps)==6 and steps(learn)==12

def test_wrapped_by_others(monkeypatch):
    "Another library wraps `Learner.fit` on top: its wrapper stays, and ours does nothing any more"
    monkeypatch.setattr(Learner, 'fit', Learner.fit)   # and put back
    turn_on_accumulation(4)
    ours,calls = Learner.fit,[]
    @wraps(ours)
    def other(self, *args, **kwargs): calls.append(1); return ours(self, *args, **kwargs)
    Learner.fit = other
    learn = make()
    assert steps(learn)==3
    turn_off_accumulation()
    assert Learner.fit is other and steps(learn)==12
    turn_on_accumulation(2)
    assert steps(learn)==6 and len(calls)==3
    turn_off_accumulation()
    assert Learner.fit is other

def test_blocks_that_overlap():
    "As in two threads: off when the last one has ended"
    one,two = accumulation(2),accumulation(4)
    one.__enter__(); two.__enter__(); one.__exit__(None, None, None)
    assert n_step()==4
    two.__exit__(None, None, None)
    assert n_step() is None

def test_counts_after_a_patched_fit():
    "They can be read, the next fit replaces them, and only `learn.cbs` says whether accumulation is on"
    learn = make(64)
    with accumulation(4): assert steps(learn)==learn.accumulate_step.counts.n_steps==2
    assert not any(isinstance(o, AccumulateStep) for o in learn.cbs) and steps(learn)==8
    with accumulation(2): assert steps(learn)==learn.accumulate_step.counts.n_steps==4
    assert deepcopy(learn).accumulate_step is None
    learn.accumulate(8).fit(1)
    assert learn.accumulate_step.counts.n_steps==1
