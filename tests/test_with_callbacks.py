"""Callbacks that fastai ships beside `AccumulateStep`, and our own; loggers, trackers and hooks are in
`test_with_loggers`"""
from matrix import *
from fastai.callback.channelslast import *
from fastai_accum.microbatch import *

fits = dict(fit=lambda l: l.fit(2), fit_one_cycle=lambda l: l.fit_one_cycle(2, .02),
            fit_flat_cos=lambda l: l.fit_flat_cos(2, .02),
            fit_sgdr=lambda l: l.fit_sgdr(2, 1, .02))
@row('Training', '`fit`, `fit_one_cycle`, `fit_flat_cos`, `fit_sgdr`',
     note='The last window of an epoch is kept or dropped.')
@each(fit=fits, drop_last=[False, True])
def test_ways_to_fit(fit, drop_last, works): works(*pair(fit=fits[fit], drop_last=drop_last))

@row('Training', '`start_epoch`', note='`SkipToEpoch`, after loading a model that was saved with its optimizer.')
def test_start_epoch(works, tmp_path):
    def fit(learn):
        learn.path = tmp_path
        learn.fit_one_cycle(2, .02, cbs=[SaveModelCallback(every_epoch=True, with_opt=True)])
        learn.load('model_0')
        learn.fit_one_cycle(2, .02, start_epoch=1)
    works(*pair(fit=fit, dls=partial(make_dls, shuffle=False)))

@row('Training', '`lr_find`', 'curve and suggestion',
     note='It counts steps. Where the loss diverges, rounding grows, so we leave out the last fifth of the curve.')
def test_curve_of_lr_find(works, tmp_path):
    sugg = {}
    def find(learn): learn.path = tmp_path; sugg[learn] = learn.lr_find(num_it=50, show_plot=False)
    a,b = pair(fit=find, n=200)
    works.same([a.recorder.lrs,a.recorder.losses[:40],len(a.recorder.losses)],
               [b.recorder.lrs,b.recorder.losses[:40],len(b.recorder.losses)])
    works.same(tuple(sugg[a]), tuple(sugg[b]))

@row('Callbacks', 'GradientClip', note='It clips the gradient of the window, with each `norm_type`.')
@each(norm_type=[1., 2., math.inf])
def test_gradient_clip(norm_type, works): works(*pair(partial(GradientClip, .01, norm_type), matters=True))

class WeightAverage(Callback):
    "An exponential average of the weights, in `after_batch`"
    run_valid = False
    def before_fit(self): self.avg = deepcopy(self.model.state_dict())
    def after_batch(self):
        for k,v in self.model.state_dict().items(): self.avg[k].lerp_(v, .2)

@row('Callbacks', 'a moving average of the weights',
     note='An exponential moving average in `after_batch`, at the default order.')
@each(drop_last=[False, True])
def test_weight_average(drop_last, works):
    a,b = pair(WeightAverage, drop_last=drop_last)
    works(a, b)
    works.same(a.weight_average.avg, b.weight_average.avg, 'average')

@row('Callbacks', 'GradientAccumulation', note="fastai's own callback. Use only one of the two.")
def test_gradient_accumulation(works):
    with works.refused(ValueError, match='AccumulateStep: the learner also has fastai'):
        pair(partial(GradientAccumulation, 32))

@row('Callbacks', 'MicroBatch', note='Our own. It cuts each micro-batch into slices, with `coupled=True` too.')
@each(coupled=[False, True])
def test_micro_batch(coupled, works):
    def train(bs, *cbs):
        learn = make_learner(make_dls(90, bs), cbs=cbs)
        learn.fit_one_cycle(2)
        return learn
    works(train(16, MicroBatch(8, coupled=coupled), AccumulateStep(2)), train(32))

class Draws:
    "Replaces a Beta distribution by a table, so that every run has the same draws"
    def __init__(self):
        self.n,self.table = 0,torch.rand(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    def sample(self, shape): self.n += shape[0]; return self.table[self.n-shape[0]:self.n]

def injected(cls, draws):
    cb = cls()
    cb.distrib = draws
    return cb

@pytest.fixture
def within_eights(monkeypatch):
    "Permutations that stay within a micro-batch of 8, also for the large batch"
    perm = lambda n: torch.cat([torch.arange(i, min(i+8,n)).flip(0) for i in range(0,n,8)])
    monkeypatch.setattr(torch, 'randperm', perm)

def conv_model(norm=nn.Identity):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3,4,3), norm(4), nn.Tanh(), nn.Conv2d(4,4,3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4,3)).double()

def image_dls(n, bs, **kwargs): return make_dls(n, bs, x=features(n, 3*8*8).reshape(n,3,8,8), **kwargs)

class CutMixByStep(CutMix):
    "The same λ and box for each micro-batch of a window, others for the next"
    def before_batch(self):
        torch.manual_seed(self.train_iter)
        super().before_batch()

once_each = 'once per micro-batch. We compare with the same draws.'
@pytest.mark.parametrize('mix', [
    pytest.param(lambda: injected(MixUp, Draws()),
                 marks=row('Callbacks', 'MixUp', note=f'It draws λ and the partners {once_each}')),
    pytest.param(CutMixByStep, marks=row('Callbacks', 'CutMix',
                                         note=f'It draws λ, the box and the partners {once_each}'))])
@each(loss=[StackedCE(), StackedCE(weight=torch.tensor([1.,5.,20.]).double())])
def test_mixed_with_the_same_draws(loss, mix, within_eights, works):
    torch.set_default_dtype(torch.float64)   # of λ, which is mixed with the losses
    try: works(*pair(mix, dls=image_dls, model=conv_model, loss_func=loss, matters=True))
    finally: torch.set_default_dtype(torch.float32)

@pytest.mark.parametrize('of_inputs', [pytest.param(False, marks=row('Callbacks', 'ChannelsLast')),
    pytest.param(True, marks=row('Models', '`channels_last` input and model'))])
def test_channels_last(of_inputs, works):
    def to_cl(cb):
        if of_inputs: cb.learn.xb = tuple(o.contiguous(memory_format=torch.channels_last) for o in cb.xb)
    a,b = pair(lambda: [ChannelsLast(), Callback(before_batch=to_cl)], dls=image_dls, model=conv_model)
    assert a.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    works(a, b)

def frozen_bn():
    model = conv_model(nn.BatchNorm2d)
    for p in model[1].parameters(): p.requires_grad_(False)
    model[1].running_mean.fill_(.1)
    return model

@row('Callbacks', 'BnFreeze', note='Frozen batch norm does not look at the micro-batch.')
def test_bn_freeze(works):
    a,b = pair(BnFreeze, dls=image_dls, model=frozen_bn, splitter=trainable_params)
    works(a, b)
    assert (a.model[1].running_mean==.1).all() and not a.model[1].training

@row('Callbacks', 'ShortEpochCallback', note='It stops after the same window.')
@each(pct=[.3,.9])
def test_short_epoch(pct, works):
    a,b = pair(lambda: ShortEpochCallback(pct), n=120, fit=lambda l: l.fit(2, .02))
    works(a, b)
    assert a.accumulate_step.counts.n_thrown==0

class Rnn(nn.Module):
    "Predictions, and the activations that `RNNRegularizer` asks for"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.head,self.n_reset = nn.RNN(6, 5, batch_first=True).double(),nn.Linear(5, 3).double(),0
    def reset(self): self.n_reset += 1
    def forward(self, x):
        h = self.body(x)[0]
        return self.head(h[:,-1]),[h],[h*.9]

def sequence_dls(n, bs, **kwargs): return make_dls(n, bs, x=features(n, 6*4).reshape(n,4,6), **kwargs)

@row('Callbacks', 'ModelResetter, RNNCallback', note='They reset the model at each epoch, not at each window.')
def test_rnn_callbacks(works):
    a,b = pair(rnn_cbs, dls=sequence_dls, model=Rnn, splitter=trainable_params)
    works(a, b)
    assert a.model.n_reset==b.model.n_reset==6   # before the fit, in each of four passes, and after it

@row('Callbacks', 'RNNRegularizer', tol=TOL32,
     note='fastai computes the penalty in float32. It is exact if the weight of a micro-batch is its number of '
          'samples. For '
     'other losses, put the penalty into the loss function.')
def test_rnn_regularizer(works):
    cbs = partial(rnn_cbs, alpha=2., beta=1.)
    a,b = pair(cbs, dls=sequence_dls, model=Rnn, splitter=trainable_params)
    works(a, b)
    assert worst(a, pair(rnn_cbs, dls=sequence_dls, model=Rnn,
                         splitter=trainable_params)[1])[0]>1e-3, 'the penalty changes nothing'

@row('Models', 'ParallelTrainer', note='`DataParallel` on a machine without GPUs, where it has one replica.')
def test_parallel_trainer(works, monkeypatch):
    from fastai.distributed import ParallelTrainer
    # another test may have loaded the simulated accelerator
    module = sys.modules['torch.nn.parallel.data_parallel']
    monkeypatch.setattr(module, '_get_available_device_type', lambda: None)
    works(*pair(lambda: ParallelTrainer(None), splitter=trainable_params))

compiler = pytest.mark.skipif(not shutil.which('g++'), reason='compiles a model to C++, and there is no compiler')
@row('Models', '`torch.compile`', note='A smaller last micro-batch has another shape, so PyTorch compiles again.')
@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=compiler)])
@pytest.mark.filterwarnings('ignore')
def test_compile(backend, works):
    works(*pair(model=lambda: torch.compile(small_model(), backend=backend), splitter=trainable_params))
    torch._dynamo.reset()

def draws(cls, **kw):
    "Loaders that draw with replacement or in part: the same draws for each run"
    def make(n, bs, drop_last):
        np.random.seed(0)
        items = list(zip(features(n), classes(n)))
        return DataLoaders(cls(dataset=items, bs=bs, drop_last=drop_last, **kw), DataLoader(items[:24], bs=16))
    return make

@row('Loaders', 'WeightedDL')
@each(drop_last=[False, True])
def test_weighted_dl(drop_last, works):
    works(*pair(dls=draws(WeightedDL, wgts=range(1,77), shuffle=True), drop_last=drop_last))

@row('Loaders', 'PartialDL')
@each(acc=[dict(n_step=4), dict(n_samples=32)])
def test_partial_dl(acc, works):
    def train(bs, cbs):
        learn = make_learner(draws(PartialDL, partial_n=50)(76, bs, False), cbs=cbs)
        once(learn)
        return learn
    works(train(8, AccumulateStep(**acc)), train(32, []))

@row('Loaders', "PyTorch's DataLoader")
@each(drop_last=[False, True])
def test_pytorch_loader(drop_last, works):
    def make(n, bs, drop_last):
        data = torch.utils.data.TensorDataset(features(n), classes(n))
        return DataLoaders(torch.utils.data.DataLoader(data, bs, drop_last=drop_last),
                           torch.utils.data.DataLoader(data, 16))
    works(*pair(dls=make, drop_last=drop_last))
