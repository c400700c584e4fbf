"""`check_accumulation` on learners with known causes. It runs the learner's own step, each remedy that it names is
tried, and the learner stays as it was"""
import pytest
from nets import *
from fastai_accum.all import *
from fastai_accum import refusals as the_refusals
from fastai_accum.core import accumulation_settings
from fastai_accum.know.what_fits import peak_bytes
from torch.optim.lr_scheduler import ExponentialLR,OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader as TorchLoader
from torchvision.ops import stochastic_depth

def bn(): return nn.BatchNorm1d(5)
net = layers
def learner(model=None, loss=None, cbs=None, y=None, x=None, bs=8, n=64, shuffle=True, cls=Learner, opt=SGD, n_inp=None,
            items=None, **kwargs):
    "`kwargs` are those of the loaders"
    x,y = features(n) if x is None else x, tuplify(classes(n) if y is None else y)
    dls = DataLoaders(*[DataLoader(items or list(zip(x, *y)), bs=bs, shuffle=shuffle, **kwargs) for _ in range(2)])
    if n_inp:
        for o in (dls,*dls.loaders): o.n_inp = n_inp
    learn = cls(dls, model or small_model(), loss_func=loss or nn.CrossEntropyLoss(), cbs=cbs, opt_func=opt, lr=.1)
    return learn.remove_cb(ProgressCallback)
def in_order(*cbs, **kwargs): return learner(cbs=cbs, **{**dict(bs=4, shuffle=False), **kwargs})

def trained(learn, n=2):
    set_seed(5)
    learn.recorder.smooth_loss = AvgSmoothLoss64()
    with learn.no_logging(): learn.fit(n)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def kinds(learn): return [o.kind for o in learn.check_accumulation().causes]
def clean(check):
    assert not check.causes and check.error<=1e-12, check
    return check
def checked(learn):
    "The result; the learner is as it was"
    was = left(learn)
    try: return learn.check_accumulation()
    finally: assert_left(was, learn)

# ---- losses, models and callbacks

def targets(): return features(64, 3, seed=5)
def rmse(p, y): return ((p-y)**2).mean().sqrt()
def each_ce(p, y): return F.cross_entropy(p, y, reduction='none')
def masked(p, y): return (each_ce(p, y)*(y!=0)).sum()/(y!=0).sum()
def padded_mean(p, y): return F.cross_entropy(p[y!=-100], y[y!=-100])
def hardest(p, y): return each_ce(p, y).topk(max(1, len(y)//2)).values.mean()
def above(p, y):
    l = each_ce(p, y)
    return l[l>1.1].sum()/(l>1.1).sum().clamp(min=1)
def contrastive(p, y):
    p = F.normalize(p)
    return F.cross_entropy(p@p.T/.1, torch.arange(len(p)).roll(1))
global_weights = torch.tensor([1.,2.,3.])   # in float32
def halves_in_turn(os): return torch.stack([o[0] for o in os]+[2*o[0] for o in os]),torch.stack([o[1] for o in os])
def both_halves(p, y):
    a,b = p.chunk(2)
    return (a-b).pow(2).mean()+F.cross_entropy(a, y)

def centred(x): return x-x.mean(0)
def centre(): return Made(lambda m, x: centred(x))
class GroupNorm(nn.BatchNorm1d): "Batch norm by another name"
def no_bias():
    res = bn()
    res.register_parameter('bias', None)
    return res
def jacobian(**kwargs):
    "Adds the size of its own slope at each sample, as contractive and physics-informed models do"
    def f(m, x): return m.net(x)+torch.func.vmap(torch.func.jacrev(m.net))(x).pow(2).sum((1,2))[:,None]
    return learner(Made(f, net=net()), cbs=MicroBatch(4, **kwargs) if kwargs else None)
def no_columns():
    "Has parameters without elements, as `tabular_learner` with categories only"
    return Made(lambda m, x: m.lin(x), bn=nn.BatchNorm1d(0), lin=nn.Linear(6,3)).double()
def dictionaries():
    items = [(dict(x=x), dict(y=y, mask=(y>0).double())) for x,y in zip(features(32), classes(32))]
    def loss(p, t): return (each_ce(p['logits'], t['y'])*t['mask']).sum()/t['mask'].sum()
    model = Made(lambda m, b: dict(logits=m.net(b['x']), more=b['x']), net=net(bn()))
    return learner(model, loss, items=items, n_inp=1)
def expanded():
    "Has a buffer without memory of its own: `expand` gives all its elements one place"
    return Made(lambda m, x: m.net(x*m.w), net=net(bn()), w=nn.Buffer(torch.ones(1).expand(6)))
def again(reentrant):
    "Runs again in the backward pass"
    def f(m, x): return checkpoint(m.m, x.requires_grad_(), use_reentrant=reentrant)
    again = Made(f, m=nn.Sequential(nn.Linear(6,5), nn.Dropout(), nn.Tanh()))
    return learner(nn.Sequential(again, nn.Linear(5,3)).double())
def coin(): return Made(lambda m, x: x if not m.training or random.random()<.5 else x*0)
def own_coin():
    "The model holds the generator, so it is no dropout that can be switched off"
    return Made(lambda m, x: x*m.rng.random(), rng=np.random.default_rng(0))
def depth(mode, p, n_views):
    "Samples, or the whole batch, are left out at random: of two views of it or of one"
    def f(m, h):
        h = torch.cat([h,h.flip(1)][:n_views])
        return sum((h+stochastic_depth(m.a(h), p, mode, m.training)).chunk(n_views))
    return Made(f, a=nn.Linear(5,5))
def packed():
    "PyTorch's `pack_padded_sequence` wants the longest sample first, as in each batch of its loader"
    def f(m, x):
        x = nn.utils.rnn.pack_padded_sequence(x, (x[...,0]!=0).sum(1).cpu(), batch_first=True)
        return m.out(m.lstm(x)[1][0][0])
    x = features(64, 12).view(64, 6, 2)
    for i,o in enumerate(x): o[6-i%8//2:] = 0
    model = Made(f, lstm=nn.LSTM(2, 4, batch_first=True), out=nn.Linear(4,3)).double()
    return learner(model, x=x, shuffle=False, cbs=AccumulateStep(2))
class Block(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(6,6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout())
def blocks(*cbs):
    torch.manual_seed(0)
    return learner(nn.Sequential(*[Block() for _ in range(3)], nn.Linear(6,3)).double(), cbs=cbs, shuffle=False)
def embeddings(norm):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), norm(12), nn.Linear(12, 3))
    return learner(model.double(), x=torch.randint(0, 9, (64,3)), cbs=AccumulateStep(2))
def compiled(m): m.compile(); m[0].compile(); return m
def texts():
    "Longer than the model reads at once"
    from fastai.text.all import TextDataLoaders,text_classifier_learner,AWD_LSTM,awd_lstm_clas_config
    df = pd.DataFrame(dict(text=['some words ']*8+['some more words '*10]*8, label=[*'xy']*8))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.25, bs=8, seq_len=10)
    config = {**awd_lstm_clas_config, **dict(n_hid=12, emb_sz=6, n_layers=2)}
    learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, seq_len=10, config=config)
    return learn.remove_cb(ProgressCallback)
def lengths(of):
    "A mean over valid tokens, where the samples of the first batch are alike"
    x,y = torch.randint(0, 11, (48,8)),torch.randint(0, 5, (48,8))
    for i,o in enumerate(y): o[of(i):] = -100
    return in_order(AccumulateStep(2), model=nn.Sequential(nn.Embedding(11,6), nn.Linear(6,5)).double(),
                    loss=padded_mean, x=x, y=y, bs=6)
def one_of_64(): return learner(loss=masked, y=(torch.arange(64)==3).long(), shuffle=False)   # one target counts

def several(os): return torch.stack([o[0] for o in os]),torch.cat([o[1] for o in os]),torch.stack([o[2] for o in os])
def unlabelled(*cbs, k=7, loss=lambda p: p.pow(2).mean(), **kwargs):
    "Each sample comes with `k` rows without a label, so batches cannot be cut"
    torch.manual_seed(0)
    def both(p, y): return F.cross_entropy(p[0], y)+loss(p[1].softmax(1))
    body = nn.Sequential(*[nn.Sequential(nn.Linear(6,6), nn.Tanh()) for _ in range(4)])
    model = Made(lambda m, x, u: (m.h(m.body(x)),m.h(m.body(u))), body=body, h=nn.Linear(6,3)).double()
    return in_order(*cbs, x=features(40), y=(features(40, k*6).view(40, k, 6),classes(40)), n_inp=2, loss=both,
                    create_batch=several, model=model, **kwargs)

def in_odd_modes():
    "Fitted, with gradients, a frozen layer, and a dropout in evaluation"
    learn = learner(net(bn(), nn.Dropout()).float(), CrossEntropyLossFlat(), x=features(64).float())
    with learn.no_logging(): learn.fit(1)
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    learn.model[0].requires_grad_(False)
    learn.model[2].eval()
    return learn

def other_dtypes():
    n,c = nn.Parameter(torch.zeros(3).long(), requires_grad=False),nn.Parameter(torch.ones(3, dtype=torch.complex128))
    return Made(lambda m, x: m.net(x)+m.c.real.sum(), net=net(), n=n, c=c)

class Penalty(Callback):
    "A module that a callback and the learner hold is that of the model in the trial too"
    def __init__(self, m): self.m = m
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + self.m.weight.square().mean()
def penalty():
    learn = learner(model := small_model(), cbs=Penalty(model[0]))
    learn.head = model[2]
    return learn
class ClipValues(Callback):
    "Cannot be copied"
    def __init__(self): self.f = threading.Lock()
    def after_backward(self): nn.utils.clip_grad_value_(self.learn.model.parameters(), .01)
class LeavesOut(Callback):
    "Small batches, and so all micro-batches"
    def after_backward(self):
        if len(self.x)<10: raise CancelBatchException
class OptsStep(Callback):
    def after_backward(self): self.learn.opt.step()
class OwnStep(Callback):
    def before_fit(self): self.own = torch.optim.SGD(self.learn.model.parameters(), lr=.1)
    def after_backward(self): self.own.step()
class ByHand(Callback):
    def after_backward(self):
        for p in self.learn.model.parameters(): p.data -= .1*p.grad
class Clears(OwnStep):
    def after_backward(self): super().after_backward(); self.own.zero_grad()
class Recipe(Callback):
    "Of a forum"
    def before_step(self): raise CancelStepException
class StepsAgain(Callback):
    "After the step of the learner, as with the large batch"
    def after_batch(self): self.learn.opt.step(); self.learn.opt.zero_grad()
class Unpack(Callback):
    "The learner cannot run without it, so it is no suspect"
    def after_pred(self): self.learn.pred = self.learn.pred['logits']
class Method(Callback):
    def before_fit(self): self.learn.loss_func = self.mean
    def mean(self, p, y): return masked(p, y)
class DrawsInBatch(Callback):
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.xb = (self.xb[0]*(.5+self.f()),)

class Ranks(Learner):
    def _do_grad_opt(self):
        self.loss_grad = self.loss_grad**2
        super()._do_grad_opt()
class Added(Learner):
    "Adds the gradient, so it is exact"
    def _backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad, ps)): p.grad = self.put(p.grad, g)
    def put(self, was, g): return g.clone() if was is None else was+g
class Assigned(Added):
    def put(self, was, g): return g.clone()
class Clipped(Learner):
    def _backward(self):
        super()._backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), .01)

class Sam(Learner):
    "Its step takes the gradient again, at other weights and on `xb`, which is the last micro-batch"
    def _step(self):
        moves = [.05*p.grad for p in self.model.parameters()]
        with torch.no_grad():
            for p,m in zip(self.model.parameters(), moves): p.add_(m)
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p,m in zip(self.model.parameters(), moves): p.sub_(m)
        self.opt.step()

class Late(Callback):
    "Adds what compares samples, at some time `when`"
    def __init__(self, when): self.when = when
    def after_loss(self):
        if self.training and self.when(self): self.learn.loss_grad = self.loss_grad+self.pred.mean(0).pow(2).sum()
def mixed(dim=0, order=torch.randperm):
    "Mixes along `dim`, in an order that it draws"
    return Made(lambda m, x: (x+x.index_select(dim, order(x.shape[dim])))/2)
class TakesLoss(Callback):
    def after_pred(self): self.l,self.learn.pred = self.pred['loss'],self.pred['logits']
    def after_loss(self): self.learn.loss_grad,self.learn.loss = self.l,self.l.detach().clone()
def own_loss():
    "The model computes its loss, as those of transformers do"
    def f(m, b): p = m.m(b['x']); return dict(loss=masked(p, b['y']), logits=p)
    items,model = [(dict(x=x, y=y),y) for x,y in zip(features(64), classes(64))],Made(f, m=small_model())
    return learner(model, lambda p,y: 0*p.sum(), [AccumulateStep(2), TakesLoss()], items=items)
def boxes(os):
    "Each sample has some boxes, and all are in one tensor, with the number of their sample"
    return torch.stack([x for x,_ in os]),torch.cat([x.new_full((1+int(y),3), i) for i,(x,y) in enumerate(os)])
def per_box(p, t): return p.pow(2).mean()+sum((p[int(o[0])]-.1*o).pow(2).sum() for o in t)/len(p)
def missing():
    "Labels are missing in the last third of the data only"
    y = targets()
    y[44:][torch.rand(20, 3)<.5] = math.nan
    return in_order(AccumulateStep(4), loss=lambda p,y: (p-y)[~y.isnan()].pow(2).mean(), y=y)
def to_the_longest(os):
    k = max(o[2] for o in os)
    return torch.stack([o[0][:k] for o in os]),torch.stack([o[1][:k] for o in os])
def longest(lengths, loss=lambda p,y: F.cross_entropy(p.flatten(0, 1), y.flatten()), **kwargs):
    items = list(zip(features(64, 48).view(64,8,6), torch.randint(0, 3, (64,8)), lengths))
    return in_order(AccumulateStep(2), items=items, create_batch=to_the_longest, loss=loss, **kwargs)

def padded_by_pytorch():
    learn = longest([5]*8+[3]*4+[8]*52)
    dl = TorchLoader(learn.dls.train.dataset, batch_size=learn.dls.train.bs, collate_fn=to_the_longest)
    learn.dls = DataLoaders(dl, dl, device='cpu')
    return learn

def behind_a_mask():
    "A frozen parameter has -inf, and another one must stay positive"
    mask = nn.Parameter(torch.zeros(3).double().log(), False)
    f = lambda m, x: m.net(x)*m.scale.log()+torch.where(m.mask==-math.inf, 0., m.mask)
    return Made(f, net=small_model(), mask=mask, scale=nn.Parameter(torch.tensor([1e-3,.5,2]).double()))

# ---- what has no cause

clean_ones = dict(
    **{f.__name__: lambda f=f: learner(small_model().float(), f(), x=features(64).float())   # some round to float32
       for f in (nn.CrossEntropyLoss,CrossEntropyLossFlat,FocalLossFlat,LabelSmoothingCrossEntropyFlat)},
    **{str(cbs): lambda cbs=cbs: learner(cbs=cbs) for cbs in (
        AccumulateStep(n_samples=24), MicroBatch(), [AccumulateStep(2),MicroBatch(4)], GradientClip(.1),
        [AccumulateStep(n_samples=16),MicroBatch(4)], [AccumulateStep(2),GradAccumDtype()])},
    coupled=lambda: learner(loss=contrastive, cbs=MicroBatch(4, coupled=True)),
    exact=lambda: learner(net(bn(), nn.Dropout()), rmse, MicroBatch(4, exact=True), targets()),
    no_columns=lambda: learner(no_columns(), cbs=MicroBatch(4, exact=True)),
    jacobian=jacobian, jacobian_in_slices=lambda: jacobian(exact=False),
    compiled=lambda: learner(compiled(net())), order=packed, penalty=penalty,
    group_norm=lambda: learner(net(nn.GroupNorm(1, 5))), norm_eval=lambda: learner(net(bn()), cbs=BatchNormEval()),
    all_count=lambda: learner(loss=masked, y=torch.ones(64).long()),
    other_dtypes=lambda: learner(other_dtypes()), sparse=lambda: embeddings(nn.Identity),
    again_after_the_batch=lambda: in_order(StepsAgain(), AccumulateStep(4)),
    of_one_length=lambda: longest([8,3,5,8]*16), longer_later=lambda: longest(sorted([2,3,5,8]*16)),
    drops_nothing=lambda: learner(net(nn.Dropout(1e-12))), samples_of_several_batches=lambda: learner(bs=1))

@each(k=clean_ones)
def test_nothing_is_wrong(k): clean(checked(clean_ones[k]()))

def test_what_is_compared():
    "The last micro-batch is smaller, unless it would have one sample only"
    for bs,n,size in (2,2,1),(3,3,1),(4,4,2),(5,4,2),(6,5,3),(8,7,4),(100,63,8):
        compared = clean(learner().check_accumulation(bs)).compared
        assert f'{n} samples' in compared and f'micro-batches of at most {size}' in compared, bs
    for bs,cbs,size in (8,AccumulateStep(4),8),(16,MicroBatch(4),4):   # that of the learner, if the samples allow it
        assert f'at most {size},' in learner(net(bn()), bs=bs, cbs=cbs).check_accumulation().compared
    # as few whole batches as make a window
    assert 'one step on 2 of the whole' in unlabelled(AccumulateStep(4), bs=10).check_accumulation().compared
    for bs in 2,3:   # batch norm refuses a micro-batch of one sample
        check = learner(net(bn())).check_accumulation(bs)
        assert [o.kind for o in check.causes]==['batch norm'] and 'whole training batches' in check.compared

def test_patch():
    "Its settings are what is checked, and stay"
    learn = learner(loss=masked)
    with accumulation(4): assert kinds(learn)==['loss'] and accumulation_settings()==dict(n_step=4)
    with accumulation(4, weight=lambda p,y: (y!=0).sum()): clean(learn.check_accumulation())
    assert kinds(learn)==['loss'] and accumulation_settings() is None

def test_rounding_is_no_cause():
    "Thirty batch norms in a row amplify rounding until it is as large as the effect of a cause"
    deep = (m for _ in range(30) for m in (nn.Linear(6,6), nn.BatchNorm1d(6), nn.ReLU()))
    check = learner(nn.Sequential(*deep, nn.Linear(6,3)).double(), cbs=MicroBatch(4, exact=True)).check_accumulation()
    assert not check.causes and check.error>1e-14   # how much is left of it depends on the processor

# ---- causes: the learner, what is found, and what stands in the place of a line that mends it

cases = dict(
    norm_without_bias=(lambda: learner(net(no_bias())), 'batch norm 1'),
    norm_of_another_name=(lambda: learner(net(GroupNorm(5)), cbs=AccumulateStep(2)), 'batch norm 1'),
    compiled=(lambda: learner(torch.compile(net(bn())), cbs=AccumulateStep(2)), 'batch norm 1',
              "exact=True cannot see into the OptimizedModule 'model', which is compiled"),
    expanded=(lambda: learner(expanded()), 'batch norm net.1'),
    sparse=(lambda: embeddings(nn.BatchNorm1d), 'batch norm 2'),
    slices=(lambda: learner(net(bn()), cbs=[MicroBatch(4), Callback(before_batch=lambda cb: print('batch'))]),
            'batch norm 1'),
    window_of_exact=(lambda: learner(net(bn()), cbs=[AccumulateStep(2), MicroBatch(4, exact=True)]), 'batch norm 1',
                     'load batches of 16 in place of AccumulateStep\n'),
    dropout=(lambda: learner(net(nn.Dropout(.3))), 'dropout 1'),
    coin=(lambda: learner(net(coin())), 'dropout 1'),
    # `exact=True` is named only where the fit accepts it
    **{f'depth_{"_".join(map(str, o))}': (lambda o=o: learner(net(depth(*o)), cbs=AccumulateStep(4)), 'dropout 1', says)
       for *o,says in (('row',.05,2,''), ('row',.02,2,''), ('batch',.1,2,'(8, exact=True)'),
                       ('row',.1,1,'(8, exact=True)'))},
    recomputed=(lambda: again(True), 'dropout 0.m.1'), recomputed_too=(lambda: again(False), 'dropout 0.m.1'),
    in_odd_modes=(in_odd_modes, 'batch norm 1, dropout 2'),
    blocks=(lambda: blocks(AccumulateStep(2)), 'batch norm 0.1, dropout 0.3',
            'load batches of 16 in place of AccumulateStep, and write `learn.gradient_checkpointing()`\n'
            'if that does not fit on the GPU, add `learn.offload_activations()`\n'
            'if not even that fits, load batches of 16 and write in place of both `learn.micro_batch('),
    checkpointing=(lambda: blocks(AccumulateStep(2), GradientCheckpointing()), 'batch norm 0.1, dropout 0.3',
                   'load batches of 16 in place of AccumulateStep, and keep GradientCheckpointing\n'
                   'if that does not fit on the GPU, add `learn.offload_activations()`\n'
                   'if not even that fits, load batches of 16 and write in place of both '
                   '`learn.micro_batch(8, exact=True)`'),
    cut_and_checkpointing=(lambda: blocks(MicroBatch(4), GradientCheckpointing()), 'batch norm 0.1, dropout 0.3',
                           'leave out MicroBatch, and keep GradientCheckpointing\n'
                           'if that does not fit on the GPU, add `learn.offload_activations()`\n'
                           'if not even that fits, write in place of both '
                           '`learn.micro_batch(4, exact=True)`'),
    offloading=(lambda: blocks(AccumulateStep(2), OffloadActivations()), 'batch norm 0.1, dropout 0.3',
                'if that does not fit, load batches of 16 and write in place of both '
                '`learn.micro_batch(8, exact=True)`'),
    rmse=(lambda: learner(loss=rmse, y=targets()), 'loss rmse'),
    masked=(lambda: learner(loss=masked), 'loss masked'), one_of_64=(one_of_64, 'loss masked'),
    sum=(lambda: learner(loss=nn.CrossEntropyLoss(reduction='sum')), 'loss CrossEntropyLoss'),
    wrong_weight=(lambda: learner(cbs=AccumulateStep(2, weight=lambda p,y: 1+(y!=0).sum())), 'loss CrossEntropyLoss'),
    wrong_sum=(lambda: learner(cbs=AccumulateStep(2, average=False)), 'loss CrossEntropyLoss'),
    float32=(lambda: learner(loss=lambda p,y: F.cross_entropy(p, y, weight=global_weights)), 'loss <lambda>'),
    loss_of_a_method=(lambda: in_order(Method(), AccumulateStep(2), bs=8), 'loss mean'),
    longer_and_longer=(lambda: lengths(lambda i: 1+i//6), 'loss padded_mean'),
    again_and_again=(lambda: lengths(lambda i: 1+i//2%8), 'loss padded_mean'),
    one_short=(lambda: lengths(lambda i: 8-(i==9)), 'loss padded_mean'),
    # of two samples, the harder ones may be those of all, by luck
    **{f.__name__: (lambda f=f: in_order(AccumulateStep(4), loss=f, bs=3), f'loss {f.__name__}')
       for f in (hardest,above)},
    uncut=(lambda: unlabelled(AccumulateStep(2), loss=lambda p: p.pow(2).mean().sqrt()), 'loss both', 'pass `weight=`'),
    own_loss=(own_loss, 'loss Made', 'pass `weight=`'), missing=(missing, 'loss <lambda>'),
    rows_of_boxes=(lambda: in_order(AccumulateStep(4), loss=per_box, create_batch=boxes), 'loss per_box', 'weight='),
    padded=(lambda: longest([3,3,3,3,8,5,5,5]*8), 'unknown Sequential', ''),
    **{f'later_by_{k}': (lambda f=f: in_order(AccumulateStep(4), Late(f)), 'callback Late') for k,f in dict(
        epochs=lambda o: o.epoch>2, steps=lambda o: o.train_iter>200, share=lambda o: o.pct_train>.9).items()},
    later_beside_a_norm=(lambda: in_order(AccumulateStep(4), Late(lambda o: o.epoch), model=net(bn())),
                         'batch norm 1, callback Late'),
    # at the first step, a teacher is the model
    taught=(lambda: in_order(AccumulateStep(4), Taught('before_batch')), 'augmentation Taught', ''),
    taught_late=(lambda: in_order(AccumulateStep(4), Taught('after_step'), loss=nn.CrossEntropyLoss(
        weight=tensor([1.,2,5]).double())), 'callback Taught', ''),
    padded_by_pytorch=(padded_by_pytorch, 'unknown Sequential', ''),
    later_behind_a_mask=(lambda: in_order(AccumulateStep(4), Late(lambda o: o.epoch), model=behind_a_mask()),
                         'callback Late'),
    partners_by_sorting=(lambda: learner(net(mixed(order=lambda n: torch.rand(n).argsort()))), 'unknown 1', ''),
    partners_by_number=(lambda: learner(net(mixed(order=lambda n: torch.randint(n, (n,))))), 'unknown 1', ''),
    partners=(lambda: learner(net(mixed())), 'unknown 1', ''),
    channels=(lambda: learner(net(mixed(1))), 'dropout 1', ''),
    partners_and_dropout=(lambda: learner(net(nn.Dropout(), mixed())), 'dropout 1, unknown 2', ''),
    mixup=(lambda: learner(loss=CrossEntropyLossFlat(), cbs=MixUp()), 'augmentation MixUp'),
    **{f'draws_of_{k}': (lambda f=f: in_order(DrawsInBatch(f), AccumulateStep(2), bs=8), 'augmentation DrawsInBatch')
       for k,f in dict(numpy=np.random.rand, python=random.random, torch=lambda: torch.rand(1).item()).items()},
    zero_grad=(lambda: learner(cbs=Callback(before_batch=lambda cb: cb.opt.zero_grad())), 'needless callback Callback',
               'remove it'),
    small=(lambda: in_order(Callback(before_batch=moves_small), AccumulateStep(2), bs=8), 'augmentation Callback'),
    clip=(lambda: learner(cbs=ClipValues()), 'callback ClipValues'),
    leaves_out=(lambda: learner(cbs=LeavesOut()), 'callback LeavesOut'),
    **{f'steps_{cb}': (lambda cb=cb: in_order(cb(), AccumulateStep(4)), f'early step {cb.__name__}',
                       'moves the weights before the window ends') for cb in (OptsStep,OwnStep,ByHand)},
    ranks=(lambda: learner(cls=Ranks), 'loss Ranks'), sam=(lambda: in_order(AccumulateStep(4), cls=Sam), 'loss Sam'),
    clamped=(lambda: learner(clamped(), lambda p,y: 20*F.cross_entropy(p, y)), 'backward 2'),
    mixup_and_norm=(lambda: learner(net(bn()), CrossEntropyLossFlat(), MixUp()), 'batch norm 1, augmentation MixUp'),
    two_of_three=(lambda: learner(loss=CrossEntropyLossFlat(), cbs=[ClipValues(), GradientClip(.1), MixUp()]),
                  'callback ClipValues, augmentation MixUp'),
    one_is_needed=(lambda: learner(Made(lambda m, x: dict(logits=m.net(x)), net=net(nn.Dropout())),
                                   cbs=[Unpack(), ClipValues()]), 'dropout net.1, callback ClipValues'),
    dictionaries=(dictionaries, 'batch norm net.1, loss loss'),
    several=(lambda: learner(net(bn(), nn.Dropout()), rmse, y=targets()), 'batch norm 1, dropout 2, loss rmse'),
    backward_too=(lambda: in_order(AccumulateStep(4), cls=Assigned, model=net(bn(), nn.Dropout())),
                  'batch norm 1, dropout 2, backward Assigned'),
    own_generator=(lambda: learner(net(own_coin())), 'unknown 1'),
    centre=(lambda: learner(net(centre())), 'unknown 1', 'write `learn.gradient_checkpointing()`'),
    centre_hides_the_loss=(lambda: learner(net(centre()), masked), 'unknown 1', '`learn.gradient_checkpointing()`'),
    exact_centre=(lambda: learner(net(centre()), cbs=MicroBatch(4, exact=True)), 'unknown 1',
                  'learn.gradient_checkpointing()'),
    centre_and_norm=(lambda: in_order(MicroBatch(4, exact=True), model=net(centre(), bn()), bs=16),
                     'batch norm 2, unknown 1', ''),
    root=(lambda: learner(Made(lambda m, x: m.b(centred(m.a(x))), a=nn.Linear(6,5), b=nn.Linear(5,3)).double()),
          'unknown Made', 'write `learn.offload_activations()`'),
    texts=(texts, 'batch norm 1.layers.0.0, dropout 0.module.encoder_dp', 'Pass seq_len='))

def moves_small(cb):
    "As an augmentation that acts at random, it leaves the large batch alone"
    if len(cb.xb[0])<=8: cb.learn.xb = cb.xb[0]+1,

def lines_of(o): return re.findall('`(learn[.].*?[)])`', o.remedy.partition('do nothing')[0])

advice = {'callback':'let it act in `before_step`, on the gradient of the window',
          'batch norm':'(`BatchNormEval`) 4.2', 'dropout':'do nothing', 'unknown':'rewrite the module',
          'loss':'`weight=`, a function (pred, *yb) that returns', 'backward':'add to the gradients that are there'}

@pytest.mark.parametrize('case', cases)
def test_causes(case, capsys, recwarn):
    """Each cause is found, and each line that is named is applied and checked again, if not a person has to write it.
    The check does not warn, and what `AccumulateStep` says once is still to come"""
    make,expected,*says = cases[case]
    learn,said = make(),set(the_refusals._noted)
    if not learn.cbs.filter(lambda o: hasattr(type(o), 'train_epoch')): learn.accumulate(2)
    capsys.readouterr()
    check = checked(learn)
    assert ', '.join(f'{o.kind} {o.where}' for o in check.causes)==expected, check
    assert check.error>1e-8 and all(o.error>1e-8 and advice.get(o.kind, '') in o.remedy for o in check.causes)
    # PyTorch's compiler may warn on stderr
    assert capsys.readouterr().out==f'{check}\n' and set(the_refusals._noted)==said
    assert not any('AccumulateStep' in str(o.message) for o in recwarn)
    if says:
        assert all(says[0] in o.remedy+check.compared for o in check.causes), check
        if not any(map(lines_of, check.causes)): return
    lines = [o for c in check.causes for o in lines_of(c) if 'micro_batch' in o]
    if not lines: return   # the window alone is to go
    ours = AccumulateStep,MicroBatch,GradientCheckpointing,OffloadActivations
    learn.remove_cbs(learn.cbs.filter(risinstance(ours)))
    eval(first(lines, lambda o: 'exact' in o) or lines[0])
    clean(learn.check_accumulation())

trainings = dict(
    **{cls.__name__: (partial(in_order, cls=cls), 4, 4, True) for cls in (Assigned,Clipped)},
    added=(partial(in_order, cls=Added), 4, 4), two_rows=(partial(unlabelled, k=2), 4, 2),
    seven_rows=(unlabelled, 4, 2), triplets=(partial(in_order, loss=triplets, n=72), 6, 2),
    pairs=(partial(in_order, loss=pairs), 4, 2),
    halves=(partial(in_order, loss=both_halves, create_batch=halves_in_turn), 4, 2))

@each(k=trainings)
def test_says_what_the_training_does(k):
    "Windows of whole batches are exact where rows belong together, and where batches cannot be cut"
    make,bs,n_step,*differs = trainings[k]
    large,learn = trained(make(bs=n_step*bs)),make(AccumulateStep(n_step), bs=bs)
    check = learn.check_accumulation()
    if 'rows' in k: assert 'the batch that the loader makes of them' in check.compared
    if not differs: clean(check); return close(trained(learn), large)
    assert rel(trained(learn), large)[0]>1e-6
    assert [(o.kind,o.where) for o in check.causes]==[('backward',k)]
    assert 'in place of AccumulateStep, and write `learn.gradient_checkpointing()`' in check.causes[0].remedy
    assert 'write in place of both `learn.micro_batch(4, coupled=True)`' in check.causes[0].remedy
    close(trained(make(MicroBatch(4, coupled=True), bs=16)), large)

def chain(*cbs): return learner(normed(nn.Dropout(.3)), cbs=cbs, shuffle=False)

@each(cb=[GradientCheckpointing,OffloadActivations], make=[blocks,chain,partial(unlabelled, bs=16)])
def test_what_does_not_cut_needs_no_cut(cb, make):
    assert torch.equal(trained(make()), trained(make(cb())))
    check = make(cb()).check_accumulation()
    assert not check.causes and check.error==0, check
    assert ('without and with' in check.compared)==(make in (blocks,chain))
    assert check.title.startswith('Your callbacks give the same') and 'bit for bit' in check.title

class Bank(Callback):
    "Pushes predictions away from those of the step before, which it takes at the event `at`"
    def __init__(self, at): self.at = at
    def before_fit(self): self.last,self.learn.loss_func = [torch.zeros(3)],self.loss
    def loss(self, p, y): return F.cross_entropy(p, y)+(p-self.last[0]).pow(2).mean()
    def __call__(self, event):
        super().__call__(event)
        if event==self.at and self.training: self.last = [self.pred.detach().mean(0)]
class Average(Callback):
    "Averages the weights"
    def before_fit(self): self.own = deepcopy(self.model)
    def after_step(self):
        for a,b in zip(self.own.parameters(), self.model.parameters()): a.data.lerp_(b.data, .5)
class Taught(Callback):
    "Has a teacher, which follows the weights at the event `at`"
    def __init__(self, at): setattr(self, at, self.move)
    def before_fit(self): self.own = deepcopy(self.model).requires_grad_(False)
    def move(self):
        for a,p in zip(self.own.parameters(), self.model.parameters()): a.data.lerp_(p.data, .3*self.training)
    def after_loss(self): self.learn.loss_grad = self.loss_grad+F.mse_loss(self.pred, self.own(self.x))
class Away(Callback):
    def before_fit(self): self.run = not hasattr(self, 'gather_preds')
class AwayToo(Callback):
    def before_batch(self): return [getattr(self.learn, 'lr_finder', None) for _ in range(1)]
class Fragile(Callback):
    def before_epoch(self): [1,2][self.epoch]

class RateOfBatch(Callback):
    def before_batch(self): self.opt.set_hyper('lr', .01*len(self.x))

named = dict(
    rate=(RateOfBatch(), 'after the step, the optimizer would not hold the same'),
    after_step=(Bank('after_step'), 'after the step, Bank would not hold the same'),
    after_batch=(Bank('after_batch'), 'after the step, Bank would not hold the same'),
    away=(Away(), 'Away may do nothing in the check'), away_too=(AwayToo(), 'AwayToo may do nothing in the check'),
    average=(Average(), 'one late in 100 epochs.'), fragile=(Fragile(), 'the start of a fit.'))

@each(k=named)
def test_what_is_said_of_callbacks(k):
    "The gradient is the same, and who holds something else, or may be off, is named"
    cb,says = named[k]
    said = repr(clean(checked(in_order(AccumulateStep(4), cb))))
    assert says in said and (type(cb).__name__ in said)==(type(cb).__name__ in says)

@each(used=['loss','penalty'])
def test_parameters_elsewhere(used):
    "Their gradients are compared, too, and no gradient stays"
    w = nn.Parameter(torch.ones(3).double())
    w.grad = torch.full_like(w, 7.)
    clean(in_order(Elsewhere(used), AccumulateStep(4), loss=lambda p,y: F.cross_entropy(p*w, y)).check_accumulation())
    assert (w.grad==7).all()

@each(again=[False,True])
def test_streams(again, capsys):
    "That a generator goes on is said by all three"
    capsys.readouterr()   # what the case before has printed
    dls = DataLoaders(*[DataLoader(Stream(again), bs=4, n=64) for _ in range(2)])
    learn = Learner(dls, small_model(), nn.CrossEntropyLoss(), lr=.1).remove_cbs([ProgressCallback,Recorder])
    fits = learn.what_fits('1GB')
    learn.noise_scale(2, 2, show_plot=False)
    for said in fits.note,capsys.readouterr().out,learn.check_accumulation().compared:
        assert ('the next fit begins later' in said)==(not again), said

# ---- what it refuses

def raises(e):
    def f(*_): raise e
    return f
def moves():
    "A buffer that depends on the number of samples, and that predictions do not show"
    def f(m, x):
        m.n += len(x)**.5
        return m.lin(x)
    return learner(Made(f, lin=nn.Linear(6,3), n=nn.Buffer(torch.zeros(1))).double(), cbs=MicroBatch(4, exact=True))
def ignored(cb=None, y=2):
    "All labels but the first one are ignored: 0/0, and no callback is to blame; one that counts is enough"
    return learner(y=tensor([y]+[2]*63), loss=CrossEntropyLossFlat(ignore_index=2), cbs=cb, shuffle=False)
def hooked(cbs=None):
    learn = learner(cbs=cbs)
    steps_in_backward(learn.model)
    return learn
def gan():
    from fastai.vision.gan import GANLearner,basic_critic,basic_generator
    dls = DataLoaders(*(DataLoader(list(zip(torch.randn(8,4,1,1), torch.randn(8,3,16,16))), bs=4) for _ in range(2)))
    return GANLearner.wgan(dls, basic_generator(16, 3, 4), basic_critic(16, 3))

refusals = dict(
    **{f'fit_{k}': (lambda k=k: jacobian(**{k:True}),   # not PyTorch's error alone
                    f'{k}=True is not possible.*saved tensor hooks.*Leave out MicroBatch')
       for k in ('coupled','exact')},
    fit_buffer=(moves, 'exact=True is not possible: .*gives other values: model.n'),
    one=(lambda: learner(bs=1, n=1), 'has 1 sample, and at least 2'),
    nan=(lambda: learner(cbs=Callback(after_loss=noop), loss=lambda p,y: (p*math.nan).mean()), 'is zero or not finite'),
    infinite=(lambda: learner(cbs=Callback(after_loss=noop), loss=lambda p,y: (p*1e308*1e3).sum()),
              'is zero or not finite'),
    zero=(lambda: learner(loss=lambda p,y: F.cross_entropy(p, y).clamp(max=1e-9)), 'is zero or not finite'),
    **{k: (lambda k=k, e=e: learner(cbs=Callback(**{k:raises(e)})),
           'Callback leaves no gradient .*: it cancels the step')
       for k,e in dict(before_step=CancelStepException, after_backward=CancelBatchException).items()},
    **{f'ignored {cb}': (lambda cb=cb: ignored(cb), 'the loss ignores all')
       for cb in (AccumulateStep(2),OffloadActivations(),None)},
    clears=(lambda: in_order(Clears(), AccumulateStep(4)),
            'Clears leaves no gradient .*by itself.*Remove it, since the weights must not move before the window ends'),
    recipe=(lambda: in_order(Recipe(), AccumulateStep(4)),
            'Recipe leaves no gradient .*: it cancels the step.*Remove it'),
    fastais=(lambda: learner(cbs=GradientAccumulation(32)), 'leave it out, with'),
    hooks=(hooked, 'hooks make it in the backward pass'),
    hooks_exact=(lambda: hooked(MicroBatch(4, exact=True)), 'hooks make it in the backward pass'),
    gan=(gan, 'GANLearner trains two models in turn.*a Learner of its own'),
    **{f'own {e}': (lambda e=e: in_order(AccumulateStep(2), loss=raises(e('no such thing'))),
                    '(?s)no such thing.*check_accumulation') for e in (RuntimeError, KeyError, AssertionError)},
    collate=(lambda: in_order(AccumulateStep(2), create_batch=raises(LookupError('no such'))), '(?s)such.*check_acc'))

@each(k=refusals)
def test_refused(k):
    "The check says what the fit says, and what to do. An error of the learner's own gets the name of the check"
    make,says = refusals[k]
    learn = make()
    with pytest.raises(Exception) as e: checked(learn)
    said = '\n'.join([str(e.value), *getattr(e.value, '__notes__', [])])
    assert re.search(says, said), said
    if k.startswith('fit'):
        with pytest.raises(ValueError, match=says): learn.fit(1)

def test_a_label_that_counts_is_enough():
    for cb in AccumulateStep(2),OffloadActivations(),None: assert not kinds(ignored(cb, y=1))

def test_bad_bs_and_layers_without_a_size():
    for bs in (0, 1, True, '4', 2.):
        with pytest.raises(ValueError, match='check_accumulation: bs must be an int of at least 2, got'):
            learner().check_accumulation(bs)
    learn = learner(nn.Sequential(nn.LazyLinear(5), nn.Linear(5,3)), cbs=AccumulateStep(2))
    with pytest.raises(ValueError, match="check_accumulation: the layer of '0.weight' has no size"):
        learn.check_accumulation()

@each(most=[9,3])
def test_goes_on_with_fewer_samples_if_memory_runs_out(most):
    learn = make_learner(make_dls(64, 16), limited(small_model(), most), cbs=AccumulateStep(4), **one_group)
    if most>4: assert 'one step on 7 samples' in checked(learn).compared
    else:
        with pytest.raises(RuntimeError, match='out of memory'): checked(learn)

# ---- as before

changes = dict(
    hyper     = lambda opt: opt.set_hyper('lr', .5),
    replaced  = lambda opt: setattr(opt.opt, 'param_groups', [dict(g, lr=.5) for g in opt.opt.param_groups]),
    in_place  = lambda opt: opt.opt.param_groups[0].update(lr=.5),
    added     = lambda opt: opt.opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))], lr=.5)),
    taken     = lambda opt: opt.opt.param_groups[0]['params'].pop(0),
    falls     = lambda opt: ExponentialLR(opt.opt, .9),
    one_cycle = lambda opt: OneCycleLR(opt.opt, max_lr=.1, total_steps=9))

@drawn(14, how=changes, fitted=[False,True], opt=[torch.optim.AdamW,torch.optim.SGD])
def test_what_a_callback_does_to_the_optimizer(how, fitted, opt):
    "In `before_fit`, as schedulers of PyTorch: it is as before afterwards, its groups and its state too"
    learn,plain = (in_order(AccumulateStep(4), opt=partial(OptimWrapper, opt=opt)) for _ in range(2))
    for o in learn,plain: trained(o, 1) if fitted else o.create_opt()
    def now(): return [(id(g), list(map(id, g['params'])), {k:v for k,v in g.items() if k!='params'})
                       for g in learn.opt.opt.param_groups]
    was = now()
    with learn.added_cbs(Callback(before_fit=lambda cb: changes[how](cb.learn.opt))): clean(checked(learn))
    assert now()==was and torch.equal(trained(learn), trained(plain))

def test_check_on_a_device(fakegpu):
    "On the device of the learner, whose generator is put back"
    learn = learner(net(bn(), nn.Dropout()))
    learn.dls.device,state = GPU,fakegpu.get_rng_state()
    check = learn.check_accumulation()
    assert f'on {GPU[:-2]}' in check.compared and [o.kind for o in check.causes]==['batch norm','dropout']
    assert torch.equal(fakegpu.get_rng_state(), state)

def test_memory_of_the_check():
    "At most twice the parameters and gradients in float64, the remedies and the proof included; 1.2 here"
    deep = [nn.Linear(200,200) for _ in range(6)]
    wide = nn.Sequential(nn.Linear(6,200), *deep, nn.BatchNorm1d(200), nn.Linear(200,3))
    learn = learner(wide.double(), opt=Adam)
    trained(learn, 1)
    own = 2*8*sum(p.numel() for p in wide.parameters())
    peak = peak_bytes(learn.check_accumulation, default_device())/own
    assert 1<=peak<=2, f'{peak:.2f} times the parameters and gradients'

# ---- what it says

def other_lengths():
    batches = [(features(6, 4)[:,:k], classes(6)) for k in (2,3,4)]
    dl = DataLoader([0,1,2], bs=None, create_batch=noop, create_item=lambda i: batches[i])
    model = nn.Sequential(Lambda(lambda x: x.mean(1, keepdim=True)), nn.Linear(1,3)).double()
    return Learner(DataLoaders(dl, dl), model, padded_mean, cbs=AccumulateStep(2)).remove_cb(ProgressCallback)

def nan_in_parts(p, y): return F.cross_entropy(p, y)*(len(p)-8)/(len(p)-8)   # in micro-batches only

def switched_off(cb):
    cb.run = False
    return cb

whole = 'Nothing is wrong: your learner trains on whole batches'
shown = dict(
    differs=(lambda: learner(net(bn()), lambda p,y: masked(p, y)), f'{whole}. Micro-batches would not give the same',
             'batch norm', 'batch norm: ', '15 samples'),
    plain=(learner, f'{whole}. Micro-batches would give the same gradient',
           'Compared: one step on 15 samples of 4 training batches',
           'AccumulateStep(n_step=2) as an example'),
    windows=(lambda: learner(cbs=AccumulateStep(2)), 'The micro-batches give the same gradient',
             'the error is'),
    cuts_nothing=(lambda: learner(net(bn()), cbs=MicroBatch(8)), f'{whole}, since the bs of MicroBatch',
                  'with MicroBatch(bs=4) as an example'),
    **{f'needless_{i}': (lambda cb=cb: learner(net(bn()), cbs=cb()), f'{whole}. Micro-batches would not give the same',
                         'AccumulateStep(n_step=2) as an example')
       for i,cb in enumerate([lambda: AccumulateStep(1), lambda: AccumulateStep(n_samples=8),
                              lambda: switched_off(AccumulateStep(4)), lambda: switched_off(MicroBatch(4))])},
    two=(lambda: blocks(AccumulateStep(2)), '\n  -> as for batch norm\n  -> or do nothing: other dropout masks'),
    advice=(lambda: in_order(AccumulateStep(4), Late(lambda o: True)), '\n  -> or load batches of'),
    no_number=(lambda: in_order(AccumulateStep(2), loss=nan_in_parts, bs=8),
               'NaN or infinite in the place of the gradient'),
    other_lengths=(other_lengths, 'of the first training batch', 'only between batches could not be compared'))

@each(k=shown)
def test_shown(k):
    make,*says = shown[k]
    check = make().check_accumulation()
    for o in says: assert o in repr(check), f'{o} is not in {check}'
    html = check._repr_html_()
    if k=='differs': assert not any(o.remedy for o in check.causes) and not ('->' in repr(check) or 'to write' in html)
    assert html.count('<tr')==(len(check.causes)+1 if check.causes else 0) and 'color' not in html
    assert ('&lt;lambda&gt;' in html)==(k=='differs') and ('could not' in repr(check))==(k=='other_lengths')

def test_time_that_is_left(capsys):
    "A line without a number of steps, which nobody knows"
    learner(net(bn()), cbs=AccumulateStep(2)).add_cb(ProgressCallback()).check_accumulation()
    said = capsys.readouterr().out
    *line,answer = said.rpartition('\r')
    assert 'The causes are looked for, about' in line[0] and 's more' in line[0] and 'step' not in line[0]
    assert answer.startswith('The micro-batches do not')

@each(tty=[True,False])
def test_a_sign_of_life_without_a_bar(tty, capsys, monkeypatch):
    "In a terminal, where the line can go again; and the answer once, also in a function of a script"
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: tty)
    check = learner(cbs=AccumulateStep(2)).check_accumulation()
    out = capsys.readouterr().out
    assert out.startswith('\rThe gradients are compared')==tty and out.endswith(f'{check}\n')
    assert out.count(check.title)==1

def test_a_notebook_shows_an_answer_once():
    "Also above the last line of a cell, and again in a cell that asks for it again"
    shell = pytest.importorskip('execnb.shell').CaptureShell()
    shell.run('from fastai_accum.know.check import *; from fastai_accum.know.bench import shown')
    shell.run('c = Check(0., [], "x", "title")')
    for cell,n in ('shown(c); c',1), ('shown(c); 1+1',1), ('c',1), ('def f(): shown(c)\nf()',1), ('shown(c)',1):
        data = [o.get('data', {}) for o in shell.run(cell)]
        assert sum('text/html' in o for o in data)==n and not shell.exc, (cell, data)
