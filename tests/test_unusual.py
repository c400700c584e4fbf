"Unusual inputs, targets, samplers, losses, loaders and models, each against the large batch"
import pytest
from dataclasses import dataclass
from functools import partial
from torch.utils.data import BatchSampler,TensorDataset,WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from harness import *
from fastai_accum.loss import *
from fastai_accum.microbatch import *

def learner(dls, cbs=None, model=None, **kwargs): return make_learner(dls, model, cbs=cbs, **{**one_group, **kwargs})
def alike(cbs=lambda: AccumulateStep(4), **kwargs):
    "Train in windows of four micro-batches, and with the large batch"
    return same(cbs, **{**one_group, **kwargs})

def batches(make, n, bs): return [make(list(range(i, min(i+bs, n)))) for i in range(0, n, bs)]
def prebatched(make, n, bs, n_inp=1):
    dls = DataLoaders(DataLoader(batches(make, n, bs), bs=None), DataLoader(batches(make, 16, 16), bs=None))
    dls.n_inp = n_inp
    return dls

# Targets that have no row for each sample

def n_boxes(i): return (i*7+3)%4   # none for some
def boxes(i): return dict(boxes=features(n_boxes(i), 4, seed=i), label=tensor(i%3))
class Target:
    def __init__(self, idxs): self.y = classes(96)[idxs]

def of_dicts(idxs): return features(96)[idxs],[boxes(i) for i in idxs]
def of_ids(idxs): return features(96)[idxs],[f'{i%3}' for i in idxs]
def of_object(idxs): return features(96)[idxs],Target(idxs)
def detection_loss(pred, ys):
    return torch.stack([F.cross_entropy(p[None], y['label'][None])*(1+len(y['boxes'])) for p,y in zip(pred, ys)]).mean()
def ids_loss(pred, ys): return F.cross_entropy(pred, tensor([int(o) for o in ys]))
def object_loss(pred, y): return F.cross_entropy(pred, y.y)
kinds = dict(dicts=(of_dicts,detection_loss), ids=(of_ids,ids_loss), object=(of_object,object_loss))

@each(4, n=[96,76], how=[dict(n_step=4),dict(n_samples=32)], kind=kinds)
def test_targets_without_rows(kind, how, n):
    make,loss = kinds[kind]
    a,_ = alike(lambda: AccumulateStep(**how), dls=partial(prebatched, make, n), loss_func=loss, opt_func=SGD,
                fit=lambda l: l.fit(2), but=('hps','step.pct_train'))
    assert a.accumulate_step.counts.n_stepped==2*n

@each(coupled=[False,True])
def test_split_targets_without_rows(coupled):
    "A right `split=` is not refused"
    def split(b, bs): return [(b[0][i:i+bs],b[1][i:i+bs]) for i in range(0, len(b[0]), bs)]
    alike(lambda: MicroBatch(5, coupled=coupled, split=split), bs=32, dls=partial(prebatched, of_dicts, 76),
          loss_func=detection_loss)

def test_count_samples():
    x,b5 = torch.ones(5,3,8,8),[dict(boxes=torch.ones(2,4))]*5
    assert count_samples((b5,), (x,))==5 and count_samples((b5,), ([torch.ones(3,4,4)]*5,))==5
    assert count_samples(((torch.ones(5),torch.ones(5,2)),), (x,))==5
    assert count_samples((dict(a=torch.ones(5)),), (x,))==5
    assert count_samples((), (x,))==5 and count_samples((tensor(1.),), (x,))==5
    assert count_samples((torch.ones(7),), (torch.ones(3,7),))==7   # samples in the second dimension of the inputs
    with pytest.raises(ValueError, match='cannot count the samples.*make one of them a tensor'):
        count_samples((object(),), (object(),))

sampled = dict(
    sampler = lambda ds, bs: TorchLoader(ds, bs, sampler=WeightedRandomSampler(torch.ones(76), 40,
                                         generator=torch.Generator().manual_seed(0))),
    batches = lambda ds, bs: TorchLoader(ds, batch_sampler=BatchSampler(list(range(0, 76, 2))+[1,3], bs, False)),
    listed  = lambda ds, bs: TorchLoader(ds, batch_sampler=list(BatchSampler(list(range(0, 76, 2))+[1,3], bs, False))))

@each(name=sampled)
def test_samplers_of_another_size(name):
    "Samplers of PyTorch that draw 40 of 76 samples"
    def dls(bs):
        ds = TensorDataset(features(76), classes(76))
        return DataLoaders(sampled[name](ds, bs), TorchLoader(ds, 16))
    a,b = alike(lambda: AccumulateStep(n_samples=32), dls=dls, fit=lambda l: l.fit(2), but=('hps','step.pct_train'))
    assert len(b.spy.steps)==4 and a.accumulate_step.counts.n_thrown==0

@each(m=[40,200])
def test_get_idxs_of_another_size(m):
    "A loader of fastai whose `len` is not its number of batches: no sample is thrown away"
    dls = make_dls(76, 8)
    dls.train.get_idxs = lambda: (list(range(76))*3)[:m]
    learn = learner(dls, AccumulateStep(n_samples=32))
    learn.fit_one_cycle(2)
    n = learn.accumulate_step.counts
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(2*m,2*m,0) and len(learn.spy.steps)==2*-(-m//32)

# Micro-batches without targets

W0 = tensor([0.,1.,3.]).double()
def without_targets():
    y = classes(64).clamp(min=1); y[8:16] = 0; y[40:48] = 0
    return y

class LearnedLoss(nn.Module):
    "A loss with a parameter, and a mask"
    def __init__(self): super().__init__(); self.t = nn.Parameter(torch.ones(3).double())
    def forward(self, pred, y): return F.cross_entropy(pred*self.t, y, weight=W0)
@dataclass
class Pred: out:Tensor
class PredOfObject(nn.Module):
    def __init__(self): super().__init__(); self.m = small_model()
    def forward(self, x): return Pred(self.m(x))
class Keeps(nn.Module):
    "Keeps activations on the model, where the loss finds them"
    def __init__(self): super().__init__(); self.m,self.h = small_model(),None
    def forward(self, x): self.h = self.m[1](self.m[0](x)); return self.m[2](self.h)

@each(name=['parameters','object','activations','plain'])
def test_micro_batch_without_targets(name):
    "A micro-batch of weight 0 has no backward pass, so its NaN cannot reach a gradient"
    def train(bs, n_step):
        model = dict(object=PredOfObject, activations=Keeps).get(name, small_model)()
        loss = dict(parameters=LearnedLoss(), object=lambda p, y: F.cross_entropy(p.out, y, weight=W0),
                    activations=lambda p,
                    y: F.cross_entropy(p, y, weight=W0)+(model.h.pow(2).mean(1)*W0[y]).sum()/W0[y].sum(),
                    plain=nn.CrossEntropyLoss(weight=W0))[name]
        split = (lambda m: [params(m)+params(loss)]) if name=='parameters' else trainable_params
        cb = AccumulateStep(n_step, weight=lambda p, y: W0[y].sum()) if n_step else None
        learn = make_learner(make_dls(64, bs, y=without_targets(), shuffle=False), model, loss_func=loss,
                             splitter=split, cbs=cb)
        learn.fit(2, cbs=NoValid())
        return learn
    assert_same(train(8, 4), train(32, None), but=('values','final_record'))

@each(3, edit=['replaced','penalty','of_weights'], event=['after_loss','before_backward'])
def test_edited_loss(edit, event):
    """The loss is scaled last, so changes of `loss_grad` in `before_backward` count; a penalty on the weights is exact
    where micro-batches weigh the same"""
    def do(cb):
        learn = cb.learn
        if not cb.training: return
        if edit=='replaced': learn.loss_grad = F.cross_entropy(learn.pred*2, *learn.yb)
        elif edit=='penalty': learn.loss_grad = learn.loss_grad + .5*learn.pred.pow(2).mean()
        else: learn.loss_grad = learn.loss_grad + sum(p.pow(2).sum() for p in cb.model.parameters())/7
    alike(also=lambda: Callback(**{event:do}), n=76 if edit=='of_weights' else 96)

# Gradients of another backward pass

def push(learn): (sum(p.pow(2).sum() for p in learn.model.parameters())/7).backward()

weighted = nn.CrossEntropyLoss(weight=tensor([1.,10.,3.]).double())

def test_another_backward_pass():
    "One that is made when the gradients are finished is not scaled"
    alike(also=lambda: Callback(before_step=lambda cb: push(cb.learn)), loss_func=weighted)

@each(when=['before_fit','after_batch','before_train'])
def test_gradients_before_a_window(when):
    "They are cleared, so the training is that of a learner that never had them"
    def do(cb):
        if when!='after_batch' or cb.training: push(cb.learn)
    alike(lambda: [Callback(**{when:do}), AccumulateStep(4)], loss_func=weighted)

# Losses in other clothes

W = tensor([1.,10.,3.]).double()
def rare(): y = classes(76); y[:20] = 0; return y
def ignoring(): y = classes(76); y[:20] = -100; return y
compile = partial(torch.compile, backend='eager')
@each(name=['compiled','compiled_function','compiled_partial'])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_compiled_losses(name):
    loss,y = dict(compiled=(lambda: compile(nn.CrossEntropyLoss(weight=W)), rare()),
                  compiled_function=(lambda: compile(F.cross_entropy), ignoring()),
                  compiled_partial=(lambda: partial(compile(F.cross_entropy), weight=W), rare()))[name]
    a,_ = alike(y=y, loss_func=loss(), fit=lambda l: l.fit(1))
    assert worst(a, learner_of_means(y))[0]>1e-3

@each(loss=[nn.CrossEntropyLoss(weight=W),F.cross_entropy])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_scripted_losses_are_refused(loss):
    learn = learner(make_dls(16, 8), AccumulateStep(2), loss_func=torch.jit.script(loss))
    with pytest.raises(ValueError, match='compiled by TorchScript.*or weight='): learn.fit(1)
    learn.accumulate(2, weight=lambda pred,targ: len(targ)).fit(1)

def learner_of_means(y):
    "Where the weights are overlooked"
    learn = learner(make_dls(76, 8, y=y, shuffle=False), AccumulateStep(4, weight=lambda p, y: len(y)),
                    loss_func=nn.CrossEntropyLoss(weight=None if (y<0).any() else W))
    learn.fit(1)
    return learn

class OwnMean(nn.CrossEntropyLoss):
    "A subclass that reduces by itself: its parent returns losses that are not reduced, or a sum"
    def forward(self, pred, y):
        loss = super().forward(pred, y)
        return loss.mean() if self.reduction=='none' else loss/len(y)

@each(reduction=['none','sum'])
def test_subclass_that_reduces_by_itself(reduction): alike(loss_func=OwnMean(reduction=reduction))

class MultiTask(nn.CrossEntropyLoss):
    "A loss with two predictions and two targets"
    def forward(self, preds, y, z):
        preds = preds.values() if isinstance(preds, dict) else preds
        a,b = preds
        return super().forward(a, y)+F.mse_loss(b[:,0], z)
class TwoHeads(nn.Module):
    def __init__(self, kind): super().__init__(); self.m,self.kind = small_model(),kind
    def forward(self, x): h = self.m(x); return dict(a=h, b=h*2) if self.kind is dict else (h,h*2)

@each(kind=[tuple,dict])
def test_subclass_with_several_targets(kind):
    def dls(bs):
        dls = make_dls(76, bs, y=(classes(76),features(76,1,seed=3)[:,0]))
        dls.n_inp = 1
        return dls
    alike(dls=dls, model=partial(TwoHeads, kind), loss_func=MultiTask())

@each(dtype=[torch.uint8,torch.int8,torch.int16,torch.int32])
def test_small_integers(dtype):
    "Class weights, and targets that are no `long`"
    class Long(nn.CrossEntropyLoss):
        def forward(self, pred, y): return super().forward(pred, y.long())
    alike(y=rare().to(dtype), loss_func=Long(weight=W))

def test_loss_swapped_before_training():
    "Another callback replaces the loss function by one that sums"
    class Swap(Callback):
        def before_train(self): self.learn.loss_func = DiceLike()
    alike(also=Swap, n=96, opt_func=SGD, lr=1e-3, fit=lambda l: l.fit(2))
class DiceLike(nn.Module):
    "Sums by nature"
    def __init__(self, reduction='sum'): super().__init__(); self.reduction = reduction
    def forward(self, pred, y): return F.cross_entropy(pred, y, reduction=self.reduction)

# Loaders

class Longer(DataLoader):
    "Yields more than its length says"
    def __len__(self): return super().__len__()//4

def test_loader_longer_than_it_says():
    def dls(bs): return DataLoaders(Longer(Items(features(160), classes(160)), bs=bs), make_dls(76, 16).valid)
    a,b = pair(lambda: AccumulateStep(4), dls=dls, fit=lambda l: l.fit(2), **one_group)
    close(weights(a), weights(b))
    assert len(a.spy.steps)==len(b.spy.steps)==10

@each(n=[40,152])
def test_loader_replaced_before_training(n):
    "The windows are those of the loader that is trained on"
    def other(cb): cb.learn.dl = make_dls(n, cb.dls.train.bs, x=features(160), y=classes(160), shuffle=False).train
    alike(also=lambda: Callback(before_train=other))

# MicroBatch

class Full(nn.Module):
    "Runs out of memory in the second window"
    def __init__(self): super().__init__(); self.m,self.n = small_model(),0
    def forward(self, x):
        self.n += self.training
        if self.training and self.n>5 and len(x)>4: raise RuntimeError('CUDA out of memory')
        return self.m(x)

def test_train_metrics_and_out_of_memory(capsys):
    "Memory runs out after the first window of an epoch, and still each sample counts once in the metric"
    def n_seen(p, y): seen.append(len(y)); return accuracy(p, y)
    seen = []
    learn = learner(make_dls(64, 8), [MicroBatch(),AccumulateStep(4)], model=Full(), metrics=n_seen)
    learn.recorder.train_metrics = True
    learn.fit(1, cbs=Callback(after_train=lambda cb: counts.append(cb.recorder.metrics[0].count)))
    assert counts==[64] and 'MicroBatch: memory ran out' in capsys.readouterr().out
counts = []

@each(2, last=['strings','number'], coupled=[False,True])
def test_inputs_without_rows(last, coupled):
    "Two inputs, of which the last has no rows, and no `n_inp` that says so"
    class Named(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x, more): return self.m(x)
    def make(idxs): return features(96)[idxs],[f'{i}' for i in idxs] if last=='strings' else 3.,classes(96)[idxs]
    def dls():
        dls = prebatched(make, 76, 32)
        del dls.n_inp
        return dls
    a,b = alike(lambda: MicroBatch(5, coupled=coupled), dls=lambda bs: dls(), model=Named)
    test = DataLoader([o[:2] for o in a.dls.valid], bs=None)
    a.dls.n_inp = b.dls.n_inp = 2
    close(a.get_preds(dl=test)[0], b.get_preds(dl=test)[0])

def test_a_model_with_the_name_of_a_callback():
    "`model.lr_finder` is no `LRFinder`, and `model.accumulate_step` no callback"
    def model():
        m = Keeps()
        m.lr_finder = m.accumulate_step = m.micro_batches = m.recorder = 'a part of the model'
        return m
    alike(model=model)
    alike(lambda: MicroBatch(8), bs=32, model=model)
