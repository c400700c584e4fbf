"`turn_on_accumulation`: every learner, every way to train, and fastai as it was afterwards"
from harness import *
from fastai_accum.core import accumulation_settings

@pytest.fixture(autouse=True)
def turned_off():
    yield
    turn_off_accumulation()

def make(n=96, **kwargs): return make_learner(make_dls(n, 8), **kwargs)
def steps(learn, **kwargs): learn.spy.steps = []; learn.fit(1, **kwargs); return len(learn.spy.steps)
def n_step(): return accumulation_settings() and accumulation_settings()['n_step']

def test_rank():
    "The page shows more"
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
    "And gets all that `fit` takes"
    learn = make()
    turn_on_accumulation(4)
    learn.fit(3, .01, .1, Callback(after_epoch=lambda cb: turn_off_accumulation()), True, 1)
    assert len(learn.spy.steps)==6 and steps(learn)==12

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
