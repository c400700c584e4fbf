"Unusual inputs, targets, samplers, losses, loaders and models, each against the large batch"
from dataclasses import dataclass
from torch.utils.data import BatchSampler,TensorDataset,WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from nets import *
from fastai_accum.loss import *
from fastai_accum.microbatch import *

def learner(dls, cbs=None, model=None, **kwargs): return make_learner(dls, model, cbs=cbs, **{**one_group, **kwargs})
def alike(cbs=lambda: AccumulateStep(4), **kwargs):
    "Train in windows of four micro-batches, and with the large batch"
    return same(cbs, **{**one_group, **kwargs})

def prebatched(make, n, bs, n_inp=1):
    batches = [make(list(range(i, min(i+bs, n)))) for i in range(0, n, bs)]
    return of_batches(batches, [make(list(range(16)))], n_inp)

# Targets that have no row for each sample

def boxes(i): return dict(boxes=features((i*7+3)%4, 4, seed=i), label=tensor(i%3))   # none for some
def detection_loss(pred, ys):
    return torch.stack([F.cross_entropy(p[None], y['label'][None])*(1+len(y['boxes'])) for p,y in zip(pred, ys)]).mean()
def ids_loss(pred, ys): return F.cross_entropy(pred, tensor([int(o) for o in ys]))
def object_loss(pred, y): return F.cross_entropy(pred, y.y)
def batch(target): return lambda idxs: (features(96)[idxs],target(idxs))
kinds = dict(dicts  = (batch(lambda idxs: list(map(boxes, idxs))), detection_loss),
             ids    = (batch(lambda idxs: [f'{i%3}' for i in idxs]), ids_loss),
             object = (batch(lambda idxs: SimpleNamespace(y=classes(96)[idxs])), object_loss))

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
    make,loss = kinds['dicts']
    alike(lambda: MicroBatch(5, coupled=coupled, split=split), bs=32, dls=partial(prebatched, make, 76), loss_func=loss)

def test_count_samples():
    x,b5 = torch.ones(5,3,8,8),[dict(boxes=torch.ones(2,4))]*5
    for yb in (b5,), ((torch.ones(5),torch.ones(5,2)),), (dict(a=torch.ones(5)),), (), (tensor(1.),):
        assert count_samples(yb, (x,))==5
    assert count_samples((b5,), ([torch.ones(3,4,4)]*5,))==5
    assert count_samples((torch.ones(7),), (torch.ones(3,7),))==7   # samples in the second dimension of the inputs
    with pytest.raises(ValueError, match='cannot count the samples.*make one of them a tensor'):
        count_samples((object(),), (object(),))


idxs = [*range(0, 76, 2),1,3]
sampled = dict(
    sampler = lambda ds, bs: TorchLoader(ds, bs, sampler=WeightedRandomSampler(torch.ones(76), 40,
                                         generator=torch.Generator().manual_seed(0))),
    batches = lambda ds, bs: TorchLoader(ds, batch_sampler=BatchSampler(idxs, bs, False)),
    listed  = lambda ds, bs: TorchLoader(ds, batch_sampler=list(BatchSampler(idxs, bs, False))))

@each(name=sampled)
def test_samplers_of_another_size(name):
    "Samplers of PyTorch that draw 40 of 76 samples"
    ds = TensorDataset(features(76), classes(76))
    a,b = alike(lambda: AccumulateStep(n_samples=32), fit=lambda l: l.fit(2), but=('hps','step.pct_train'),
                dls=lambda bs: DataLoaders(sampled[name](ds, bs), TorchLoader(ds, 16)))
    assert len(b.spy.steps)==4 and a.accumulate_step.counts.n_thrown==0

# Micro-batches without targets

def keeps(out=noop):
    "Keeps activations on the model, where the loss finds them, and may return an object"
    def f(m, x):
        m.h = m.m[1](m.m[0](x))
        return out(m.m[2](m.h))
    return Made(f, m=small_model(), h=None)
@dataclass
class Pred: out:Tensor

@each(name=['parameters','object','activations','plain'])
def test_micro_batch_without_targets(name):
    "A micro-batch of weight 0 has no backward pass, so its NaN cannot reach a gradient"
    w,targs = tensor([0.,1.,3.]).double(),classes(64).clamp(min=1)
    targs[8:16] = targs[40:48] = 0
    def train(bs, *cbs):
        model = small_model() if name=='plain' else keeps(Pred if name=='object' else noop)
        plain,t = nn.CrossEntropyLoss(weight=w),nn.Parameter(torch.ones(3).double())
        loss = dict(plain=plain, parameters=Made(lambda m, p, y: plain(p*m.t, y), t=t),
                    object=lambda p, y: plain(p.out, y),
                    activations=lambda p, y: plain(p, y)+(model.h.pow(2).mean(1)*w[y]).sum()/w[y].sum())[name]
        split = lambda m: [params(m)+[t]*(name=='parameters')]
        learn = make_learner(make_dls(64, bs, y=targs, shuffle=False), model, loss, splitter=split, cbs=cbs)
        learn.fit(2, cbs=NoValid())
        return learn
    assert_same(train(8, AccumulateStep(4, weight=lambda p, y: w[y].sum())), train(32), but=('values','final_record'))

# Callbacks, losses and loaders in other clothes

W = tensor([1.,10.,3.]).double()
weighted = dict(loss_func=nn.CrossEntropyLoss(weight=W))
def rare(v=0): y = classes(76); y[:20] = v; return y
compiled = partial(torch.compile, backend='eager')

def push(cb):
    "Adds gradients of another backward pass"
    if cb.training: (sum(p.pow(2).sum() for p in cb.model.parameters())/7).backward()
def edits(f, event):
    def do(cb):
        if cb.training: cb.learn.loss_grad = f(cb.learn)
    return dict(also=partial(Callback, **{event:do}))

class OwnMean(nn.CrossEntropyLoss):
    "A subclass that reduces by itself: its parent returns losses that are not reduced, or a sum"
    def forward(self, pred, y):
        loss = super().forward(pred, y)
        return loss.mean() if self.reduction=='none' else loss/len(y)

class MultiTask(nn.CrossEntropyLoss):
    "A loss with two predictions and two targets"
    def forward(self, preds, y, z):
        a,b = preds.values() if isinstance(preds, dict) else preds
        return super().forward(a, y)+F.mse_loss(b[:,0], z)
def two_heads(of):
    def dls(bs):
        dls = make_dls(76, bs, y=(classes(76),features(76,1,seed=3)[:,0]))
        dls.n_inp = 1
        return dls
    return dict(dls=dls, model=lambda: Made(lambda m, x: of(m.m(x)), m=small_model()), loss_func=MultiTask())

class Long(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred, y.long())

def longer(cb): cb.learn.dl = make_dls(152, cb.dls.train.bs, shuffle=False).train

class DiceLike(nn.Module):
    "Sums by nature"
    def __init__(self, reduction='sum'): super().__init__(); self.reduction = reduction
    def forward(self, pred, y): return F.cross_entropy(pred, y, reduction=self.reduction)
def swaps(cb): cb.learn.loss_func = DiceLike()

def named():
    "`model.lr_finder` is no `LRFinder`, and `model.accumulate_step` no callback"
    m = small_model()
    m.lr_finder = m.accumulate_step = m.micro_batches = m.recorder = 'a part of the model'
    return m

cases = dict(
    # the loss is scaled last, so changes of `loss_grad` in `before_backward` count; a penalty on the weights is exact
    # where micro-batches weigh the same
    replaced   = lambda: dict(edits(lambda l: F.cross_entropy(l.pred*2, *l.yb), 'before_backward'), n=96),
    penalty    = lambda: dict(edits(lambda l: l.loss_grad+.5*l.pred.pow(2).mean(), 'after_loss'), n=96),
    of_weights = lambda: edits(lambda l: l.loss_grad+sum(p.pow(2).sum() for p in l.model.parameters())/7,
                               'before_backward'),
    # a backward pass when the gradients are finished is not scaled; gradients from before a window are cleared
    finished    = lambda: dict(weighted, also=partial(Callback, before_step=push)),
    after_batch = lambda: dict(weighted, cbs=lambda: [Callback(after_batch=push), AccumulateStep(4)]),
    compiled = lambda: dict(y=rare(), loss_func=compiled(nn.CrossEntropyLoss(weight=W))),
    compiled_function = lambda: dict(y=rare(-100), loss_func=compiled(F.cross_entropy)),
    compiled_partial  = lambda: dict(y=rare(), loss_func=partial(compiled(F.cross_entropy), weight=W)),
    own_mean = lambda: dict(loss_func=OwnMean(reduction='none')),
    own_sum  = lambda: dict(loss_func=OwnMean(reduction='sum')),
    several_targets = lambda: two_heads(lambda h: (h,h*2)),
    several_in_dict = lambda: two_heads(lambda h: dict(a=h, b=h*2)),
    uint8 = lambda: dict(y=rare().to(torch.uint8), loss_func=Long(weight=W)),
    swapped_loss = lambda: dict(also=partial(Callback, before_train=swaps), n=96, opt_func=SGD, lr=1e-3,
                                fit=lambda l: l.fit(2)),
    names = lambda: dict(model=named),
    # the windows are those of the loader that is trained on
    longer_loader = lambda: dict(also=partial(Callback, before_train=longer)))

try: compiled(F.cross_entropy)
except AssertionError:   # PyTorch 2.6 compiles no function of its own
    for k in 'compiled_function','compiled_partial': del cases[k]

@each(name=cases)
def test_alike(name): alike(**cases[name]())

@each(loss=[nn.CrossEntropyLoss(weight=W),F.cross_entropy])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_scripted_losses_are_refused(loss):
    learn = learner(make_dls(16, 8), AccumulateStep(2), loss_func=torch.jit.script(loss))
    with pytest.raises(ValueError, match='compiled by TorchScript.*or weight='): learn.fit(1)
    learn.accumulate(2, weight=lambda pred,targ: len(targ)).fit(1)

# MicroBatch

def full(m, x):
    "Runs out of memory in the second window"
    m.n += m.training
    if m.training and m.n>5 and len(x)>4: raise RuntimeError('CUDA out of memory')
    return m.m(x)

def test_train_metrics_and_out_of_memory(capsys):
    "Memory runs out after the first window of an epoch, and still each sample counts once in the metric"
    counts,model = [],Made(full, m=small_model(), n=0)
    learn = learner(make_dls(64, 8), [MicroBatch(),AccumulateStep(4)], model=model, metrics=accuracy)
    learn.recorder.train_metrics = True
    learn.fit(1, cbs=Callback(after_train=lambda cb: counts.append(cb.recorder.metrics[0].count)))
    assert counts==[64] and 'MicroBatch: memory ran out' in capsys.readouterr().out

@each(2, last=['strings','number'], coupled=[False,True])
def test_inputs_without_rows(last, coupled):
    "Two inputs, of which the last has no rows, and no `n_inp` that says so"
    def make(idxs): return features(96)[idxs],[f'{i}' for i in idxs] if last=='strings' else 3.,classes(96)[idxs]
    learns = alike(lambda: MicroBatch(5, coupled=coupled), dls=lambda bs: prebatched(make, 76, 32, n_inp=None),
                   model=lambda: Made(lambda m, x, more: m.m(x), m=small_model()))
    test = DataLoader([o[:2] for o in learns[0].dls.valid], bs=None)
    for l in learns: l.dls.n_inp = 2
    close(*(l.get_preds(dl=test)[0] for l in learns))
