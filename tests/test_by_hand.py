"A learner that owns one of our callbacks is entered and run by hand, as fastai's own notebooks do to look at MixUp"
import pytest
from harness import *
from fastai_accum.patch import *

cbs = dict(acc=lambda: AccumulateStep(4), micro=lambda: MicroBatch(3), coupled=lambda: MicroBatch(3, coupled=True),
           both=lambda: [AccumulateStep(2), MicroBatch(3)])

@each(name=cbs)
def test_events_by_hand(name):
    def images(bs): return make_dls(64, bs, x=features(64, 16).view(64,1,4,4), y=classes(64), shuffle=False)
    def model(): return nn.Sequential(nn.Flatten(), small_model(16))
    mix = MixUp(.4)
    mix.distrib = torch.distributions.Beta(*torch.tensor([.4,.4], dtype=torch.float64))
    learn = make_learner(images(8), model(), cbs=[mix, *L(cbs[name]())], splitter=trainable_params,
                         loss_func=StackedCE())
    with learn:
        learn.epoch,learn.training,learn.dl = 0,True,learn.dls.train
        learn('before_train')
        b = learn.dls.one_batch()
        learn._split(b)
        learn('before_batch')
        assert learn.x.shape==b[0].shape and not torch.equal(learn.x, b[0])   # mixed
        learn('after_train')
    is_clean(learn)
    learn.fit(1)
    assert len(learn.spy.steps)==dict(acc=2, both=4).get(name, 8)
    is_clean(learn)

def test_summary_and_one_batch():
    "`learn.summary()`, `learn.one_batch` outside of a fit, and a fit that is as without them"
    a,b = make_learner(make_dls(76, 8, shuffle=False),
                       cbs=AccumulateStep(4)),make_learner(make_dls(76, 32, shuffle=False))
    a.summary()
    is_clean(a)
    for l in (a,b): l.fit(2)
    assert_same(a, b)

@pytest.mark.parametrize('cb,bs', [(lambda: AccumulateStep(4), 8), (lambda: MicroBatch(8), 32)])
def test_a_loop_of_ones_own(cb, bs):
    "Only `fit` knows windows: each call of `learn.one_batch` is a step with its batch, as without our callbacks"
    def run(cbs):
        learn = make_learner(make_dls(64, bs, shuffle=False), cbs=cbs)
        learn.remove_cbs([learn.recorder,learn.micro])
        learn.create_opt()
        learn.spy.before_fit()
        learn.model.train()
        learn.training,learn.train_iter,learn.pct_train,learn.n_iter = True,0,0.,64//bs
        learn.n_epoch = 1
        for i,b in enumerate(learn.dls.train): learn.one_batch(i, b)
        return learn.spy.steps,[p.detach() for p in learn.model.parameters()]
    ours,plain = run(cb()),run(None)
    assert rel(ours, plain)[0]==0 and len(ours[0])==64//bs
