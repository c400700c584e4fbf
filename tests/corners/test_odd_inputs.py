"Several inputs and targets, predictions in dictionaries, parameters without gradients, frozen groups"
import pytest
from harness import *

class Named(nn.Module):
    "Two inputs, a dictionary of two outputs, and a parameter that is never used"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.unused = nn.Linear(6,3).double(),nn.Linear(6,1).double(),nn.Linear(6,1).double()
    def forward(self, x1, x2): return dict(classes=self.a(x1*x2), value=self.b(x1))

@pytest.mark.parametrize('as_tuple', [False, True])
def test_several_inputs_and_targets(as_tuple):
    "Two inputs, two targets, predictions in a dictionary or a tuple, gradients that are None"
    def loss(pred, c, v):
        pc,pv = pred if as_tuple else (pred['classes'],pred['value'])
        return F.cross_entropy(pc, c) + F.mse_loss(pv[:,0], v)
    def train(bs, cb=None):
        x = features(76)
        trn = DataLoader(Items(x, (features(76,seed=9), classes(76), features(76,1,seed=8)[:,0])), bs=bs)
        learn = make_learner(DataLoaders(trn, trn), Named(), loss_func=loss, splitter=trainable_params, cbs=cb)
        learn.dls.n_inp = 2
        if as_tuple:
            learn.add_cb(Callback(after_pred=lambda cb: setattr(cb.learn, 'pred', tuple(cb.learn.pred.values()))))
        learn.fit_one_cycle(2)
        return learn
    a,b = train(8, AccumulateStep(4)),train(32)
    assert_same(a, b)
    assert a.model.unused.weight.grad is None

def test_dictionary_of_weight_zero():
    "The cut reaches predictions in a dictionary"
    mask = torch.ones(64).double(); mask[8:16] = 0
    def loss(pred, targ, mask): return (((pred['classes']-targ[:,None])**2).mean(1)*mask).sum()/mask.sum()
    def train(bs, cb=None):
        trn = DataLoader(Items(features(64), (features(64,seed=9), features(64,1,seed=8)[:,0], mask)), bs=bs)
        learn = make_learner(DataLoaders(trn, trn), Named(), loss_func=loss, splitter=trainable_params, cbs=cb)
        learn.dls.n_inp = 2
        learn.fit(1)
        return learn
    a,b = train(8, AccumulateStep(4, weight=lambda pred,targ,mask: mask.sum())),train(32)
    assert_same(a, b, but=('values','final_record'))   # the validation loader is the training loader, in other batches

def test_frozen_groups():
    def train(bs, cb=None):
        learn = make_learner(make_dls(76, bs), cbs=cb)
        learn.freeze(); learn.fit_one_cycle(1)
        learn.unfreeze(); learn.fit_one_cycle(2, slice(1e-3,1e-2))
        return learn
    assert_same(train(8, AccumulateStep(4)), train(32))
