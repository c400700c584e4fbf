"`learn.n_steps` says before a fit how many steps the optimizer will make; `test_windows` compares it with many fits"
from nets import *
from fastai_accum import processes as module

def test_accumulation_for_every_learner():
    "What is turned on counts, unless the learner has an `AccumulateStep` of its own, even one that is off"
    cbs = None,AccumulateStep(2),AccumulateStep(2),MicroBatch(3)
    plain,own,off,cut = (make_learner(make_dls(64, 8), cbs=cb) for cb in cbs)
    off.accumulate_step.run = False
    with accumulation(4):
        for o,n in (plain,2),(own,4),(off,8),(cut,2):
            assert o.n_steps()==n
            o.fit(1)
            assert len(o.spy.steps)==n
    assert plain.n_steps()==cut.n_steps()==8

four = AccumulateStep(4)
@each(case=[
    (lambda: of_batches([(features(5), classes(5))]*4), AccumulateStep(n_samples=8), 'no batch size.*n_samples=8.*use'),
    (lambda: make_dls(76, 8), GradientAccumulation(32), "fastai's GradientAccumulation.*use AccumulateStep"),
    (lambda: None, None, 'no training loader'), (DataLoaders, None, 'no training loader'),
    *((lambda: make_dls(76, 8), [*L(acc),cb], f'{type(cb).__name__}.*nobody knows')
      for cb in (ShortEpochCallback(.5, short_valid=False), SkipToEpoch(1)) for acc in (None,four)),
    *((lambda skip=skip: make_dls(64, 8, skip=skip), four, 'items of the loader raise SkipItemException')
      for skip in (range(0, 64, 2), range(32, 64), [0], [63]))])
def test_what_cannot_be_known(case):
    "A few items may be loaded, and random numbers are as before"
    dls,cbs,match = case
    learn = Learner(dls(), small_model(), nn.MSELoss(), cbs=cbs)
    was = torch.get_rng_state(),random.getstate()
    with pytest.raises(ValueError, match=f'n_steps: .*{match}'): learn.n_steps(2)
    assert identical(was, (torch.get_rng_state(),random.getstate()))
    with pytest.raises(ValueError, match='n_epoch must be an int of at least 1, got 0'): learn.n_steps(0)

def test_several_processes(monkeypatch):
    "Before a fit in `distrib_ctx`, the loader is not yet cut; its windows of samples are filled by all processes"
    distributed = pytest.importorskip('fastai.distributed')
    class DistributedTrainer(Callback): "As fastai's, which needs a process group"
    for o in module,distributed: monkeypatch.setattr(o, 'num_distrib', lambda: 2)
    for way,n in (AccumulateStep(2),3),(AccumulateStep(n_samples=32),3),(None,5):
        learn = make_learner(make_dls(76, 8), cbs=L(way)+[DistributedTrainer()])   # 10 batches, 5 for each
        assert learn.n_steps()==n

def test_a_stream_of_known_length():
    "It has no items to look at, and as many steps as its `n` says"
    dls = DataLoaders(*[DataLoader(Stream(), bs=4, n=64) for _ in range(2)])
    learn = make_learner(dls, cbs=[NoValid(), AccumulateStep(4)])
    assert learn.n_steps(2)==8
    learn.fit(2)
    assert len(learn.spy.steps)==8
