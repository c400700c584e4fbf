"`learn.n_steps` says before a fit how many steps the optimizer will make"
from harness import *
from fastai_accum.patch import *
from fastai_accum import processes as module
from fastai_accum.know.schedules import *

def grows(pct): return 1 if pct<.3 else 3
ways = dict(none=list, four=lambda: AccumulateStep(4), one=lambda: AccumulateStep(1),
            samples=lambda: AccumulateStep(n_samples=20), schedule=lambda: AccumulateStep(grows),
            dropped=lambda: AccumulateStep(4, drop_last=True),
            scheduled_samples=lambda: AccumulateStep(n_samples=lambda pct: 8*grows(pct)),
            cut=lambda: MicroBatch(3), both=lambda: [AccumulateStep(4), MicroBatch(3)])

@drawn(9, way=ways, drop_last=[False,True], n_epoch=[1,3])
def test_it_is_what_the_fit_makes(way, drop_last, n_epoch):
    learn = make_learner(make_dls(76, 8, drop_last=drop_last), cbs=ways[way]())
    n = learn.n_steps(n_epoch)
    learn.fit(n_epoch)
    assert n==len(learn.spy.steps)>0

def test_accumulation_for_every_learner():
    "What is turned on counts, unless the learner has an `AccumulateStep` of its own, even one that is off"
    plain,own,off = (make_learner(make_dls(64, 8), cbs=cb) for cb in (None, AccumulateStep(2), AccumulateStep(2)))
    off.accumulate_step.run = False
    with accumulation(4):
        assert [o.n_steps() for o in (plain,own,off)]==[2,4,8]
        for o,n in (plain,2),(own,4),(off,8):
            o.fit(1)
            assert len(o.spy.steps)==n
    assert plain.n_steps()==8

def test_a_scheduler_of_ones_own():
    "A `OneCycleLR` of PyTorch ends where the fit ends"
    class Own(Callback):
        def before_fit(self):
            sgd = torch.optim.SGD(self.learn.model.parameters(), lr=.1)
            self.sched = torch.optim.lr_scheduler.OneCycleLR(sgd, .1, total_steps=self.learn.n_steps(self.n_epoch)+1)
            sgd.step()
        def after_step(self): self.sched.step()
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), Own()])
    learn.fit(3)
    close(learn.own.sched.get_last_lr()[0], .1/25/1e4)

def test_nobody_knows():
    dl = DataLoader([(features(5), classes(5))]*4, bs=None)
    learn = make_learner(DataLoaders(dl, dl), cbs=AccumulateStep(n_samples=8))
    with pytest.raises(ValueError, match=r'n_steps: .*no batch size.*n_samples=8.*use n_step'): learn.n_steps()
    with pytest.raises(ValueError, match='n_epoch must be an int of at least 1, got 0'): learn.n_steps(0)

def test_several_processes(monkeypatch):
    "Before a fit in `distrib_ctx`, the loader is not yet cut; its windows of samples are filled by all processes"
    distributed = pytest.importorskip('fastai.distributed')
    class DistributedTrainer(Callback): "As fastai's, which needs a process group"
    monkeypatch.setattr(module, 'num_distrib', lambda: 2)
    monkeypatch.setattr(distributed, 'num_distrib', lambda: 2)
    for way,n in (AccumulateStep(2),3),(AccumulateStep(n_samples=32),3),(None,5):
        learn = make_learner(make_dls(76, 8), cbs=L(way)+[DistributedTrainer()])   # 10 batches, 5 for each
        assert learn.n_steps()==n

def test_what_cannot_be_known():
    learn = make_learner(make_dls(76, 8), cbs=GradientAccumulation(32))
    with pytest.raises(ValueError, match="n_steps: fastai's GradientAccumulation.*use AccumulateStep"): learn.n_steps()
    for dls in None,DataLoaders():
        learn = Learner(dls, small_model(), nn.MSELoss())
        with pytest.raises(ValueError, match='n_steps: .*no training loader'): learn.n_steps()
