"Trackers, loggers, predictions and hooks beside `AccumulateStep`"
from contextlib import redirect_stdout,suppress
from unittest import mock
import sklearn.metrics as skm
import fastai.callback.progress as fap
from fastai.callback.data import CollectDataCallback
from fastai.callback.preds import MCDropoutCallback
from fastai.interpret import ClassificationInterpretation,Interpretation
from fastai.metrics import F1Score,LossMetric,Perplexity,RocAuc,skm_to_fastai
from matrix import *

def acc(pred, targ): return (pred.argmax(-1)==targ).double().mean()   # fastai's `accuracy` is a float32 mean

def fields(text, sep=None):
    "What stands in `text`, numbers as numbers"
    res = text.strip().split(sep)
    for i,o in enumerate(res):
        with suppress(ValueError): res[i] = float(o.rstrip('.'))
    return res

def said(n):
    "Fit `n` epochs, at a rate where the best is not the last; `got` is the last, what is printed, each saved model"
    def fit(learn):
        with redirect_stdout(io.StringIO()) as out: learn.fit(n, .2)
        files = {f:torch.load(f, weights_only=False) for f in sorted(Path().glob('models/*.pth'))}
        for f in files: f.unlink()
        learn.got = [learn.epoch, fields(out.getvalue()), {f.stem:o for f,o in files.items()}]
    return fit

def again(f):
    "Fit, `got` what `f` gets from the learner, and fit again"
    def fit(learn): learn.fit_one_cycle(2); learn.got = f(learn); learn.fit_one_cycle(1)
    return fit

def three(learn): learn.fit_one_cycle(3)

def keep(f, event, order=0):
    "A callback that adds to `learn.got` what `f` returns at `event`, unless it is None"
    def g(cb):
        if (res := f(cb)) is not None: vars(cb.learn).setdefault('got', []).append(res)
    return at_order(order, **{event:g})

def windows(o, n_epoch=1, n_micro=10):
    "The entries of `o`, one a micro-batch, by window"
    assert len(o)==n_epoch*n_micro
    return [w for e in range(n_epoch) for w in chunked(o[e*n_micro:(e+1)*n_micro], 4)]

# Trackers

printed = dict(compared='everything, and what it prints', metrics=acc)
def saves(n, with_opt, **kw):
    "`SaveModelCallback` writes `n` files"
    def check(a, b): return len(b.got[2])==n and all(('opt' in o)==with_opt for o in b.got[2].values())
    return case('Trackers', 'SaveModelCallback', cbs=partial(SaveModelCallback, with_opt=with_opt, **kw), fit=said(5),
                metrics=acc, check=check, compared='everything, each file, and what it prints',
                note='The best model, `every_epoch` and `at_end`, each with and without the optimizer.')

test_trackers = alike(
    case('Trackers', 'EarlyStoppingCallback', *given(EarlyStoppingCallback, {}, dict(patience=3),
         dict(monitor='acc', min_delta=.1, patience=2), dict(monitor='train_loss')), **printed, fit=said(8),
         note='It stops at the same epoch.', check=lambda a,b: 2<=b.epoch<7 and 'stopping' in b.got[1]),
    saves(1, False, monitor='acc'), saves(1, True), saves(5, False, every_epoch=True), saves(3, True, every_epoch=2),
    saves(1, False, at_end=True),
    case('Trackers', 'ReduceLROnPlateau', *given(ReduceLROnPlateau, {},
         dict(monitor='acc', patience=2, factor=3., min_delta=.05, min_lr=.05)), **printed, fit=said(6),
         note='Each step has the same learning rates.', check=lambda a,b: len(set(b.recorder.lrs))>1))

@row('Trackers', 'TerminateOnNaNCallback', 'weights, losses and learning rates',
     note='It stops after the window with the NaN, as it stops after the large batch.')
@each(at=[4,7])
def test_terminate_on_nan(at, works):
    x = features(76)
    x[at*8:at*8+8] = math.nan   # micro-batch `at`, in the second window
    a,b = pair(TerminateOnNaNCallback, dls=partial(make_dls, x=x, shuffle=False), fit=lambda l: l.fit(3, .2))
    works.same(*([l.recorder.losses, l.recorder.lrs, l.epoch, l.iter, weights(l)] for l in (a,b)))
    assert all(p.isnan().all() for p in b.model[-1].parameters()) and len(b.recorder.losses)==1

# Loggers

def csv(learn):
    learn.fit(3); learn.fit_one_cycle(2)
    learn.got = [fields(l, ',')[:-1] for l in Path('log.csv').read_text(encoding='utf-8').splitlines()]
    Path('log.csv').unlink()

def drawn_lines(learn):
    "A bar that keeps what it is told: lines, and points of the graph"
    learn.got = []
    class Master(fap.master_bar):
        def write(self, line, table=False):
            learn.got.append([fields(o) for o in line[:-1]])
            super().write(line, table)
        def update_graph(self, *args): learn.got.append(deepcopy(args)); super().update_graph(*args)
    learn.logger = print
    learn.add_cbs([ProgressCallback(), ShowGraphCallback()])   # here, since `make_learner` removes bars
    with mock.patch.object(fap, 'master_bar', Master): learn.fit(3)

class HalfLoss(nn.CrossEntropyLoss):
    "A loss that keeps a part of itself, as `LossMetric` reads it"
    def forward(self, *args): res = super().forward(*args); self.half = res.detach()/2; return res

def measured(valid, learn):
    learn.recorder.train_metrics,learn.recorder.valid_metrics = True,valid
    three(learn)
    learn.got = list(learn.recorder.metric_names)

def halves_of(a, b):
    rec = a.recorder
    half,ce = ([v[i] for v in rec.values] for n in ('half','ce')
               for i,k in enumerate(rec.metric_names[1:]) if k in (n, f'train_{n}'))
    return half==pytest.approx([o/2 for o in ce], rel=TOL) and len(rec.values[0]) in (9,18)

def scalars(learn):
    fat = pytest.importorskip('fastai.callback.tensorboard', reason='logs to tensorboard, which is not installed')
    learn.got = []
    class Writer(fat.SummaryWriter):
        def add_scalar(self, tag, v, step): learn.got.append([tag,v,step]); super().add_scalar(tag, v, step)
    with mock.patch.object(fat, 'SummaryWriter', Writer):
        learn.fit_one_cycle(3, cbs=fat.TensorBoardCallback(trace_model=True, log_preds=False))

def entries(learn):
    "Of a run of W&B without network"
    wandb = pytest.importorskip('wandb', reason='logs to W&B, whose package wandb is not installed')
    import fastai.callback.wandb as faw
    learn.got = []
    def log(d, step=None):
        d = dict(d)
        assert d.pop('train_samples_per_sec', 1)>0
        learn.got.append([step,d])
        run.log(d, step=step)
    def init_args_of(o): return init_args(o) if hasattr(o, '__dict__') else {}   # where its error is
    env = dict(WANDB_MODE='offline', WANDB_DIR='.', WANDB_SILENT='true', WANDB_CONSOLE='off')
    with (mock.patch.dict(os.environ, env), mock.patch.object(faw, 'init_args', init_args_of, create=True),
          mock.patch.object(faw.WandbCallback, '_wandb_watch_called', False)):
        run = wandb.init(project='p')
        wandb.log = log   # `init` has set it
        learn.add_cb(faw.WandbCallback(log_preds=False))
        learn.fit_one_cycle(3); learn.fit(1)
        wandb.finish(); wandb.teardown()

def are_windows(a, b):
    "The entries of `b` are those of three windows an epoch"
    at = [d['epoch'] for _,d in b.got if 'epoch' in d]
    assert at==pytest.approx([e+f for e in range(4) for f in (1/3,2/3,1,1)])
    return len(b.got)==4*(3*2+2)+2 and sum('raw_loss' in d for _,d in b.got)==12

test_loggers = alike(
    case('Loggers', 'CSVLogger', *given(CSVLogger, dict(fname='log.csv'), dict(fname='log.csv', append=True)), fit=csv,
         compared='everything, and the file without the times', note='With `append=True` too.', metrics=acc,
         check=lambda a,b: b.got[0]==['epoch','train_loss','valid_loss','acc']
               and len(b.got)==(7 if b.csv_logger.append else 3)),
    case('Loggers', 'ProgressCallback, ShowGraphCallback',
         compared='everything, the graph and its bounds, the comment at each step, and the lines without the times',
         note='The bar moves at each micro-batch.', metrics=acc, fit=drawn_lines,
         cbs=lambda: keep(lambda cb: cb.progress.pbar.comment if cb.training else None, 'after_batch', 61),
         check=lambda a,b: len(b.got)==9+(1+3)+3),
    case('Loggers', 'Recorder(train_metrics=True)',
         *[dict(o, fit=partial(measured, valid)) for o in tails for valid in (True,False)], loss_func=HalfLoss(),
         note='Metrics that are functions, metrics of the loss or its parts, and metrics of all predictions. Each '
              'micro-batch counts with its own loss.', check=halves_of,
         metrics=[acc, AvgLoss(), Perplexity(), LossMetric('half'), F1Score(average='macro'),
                  skm_to_fastai(skm.cohen_kappa_score), RocAuc(multi_class='ovr'),
                  AccumMetric(lambda p,t: F.cross_entropy(p, t), name='ce', flatten=False)]),
    case('Loggers', 'TensorBoardCallback', metrics=acc, fit=scalars,
         compared='everything, and each scalar with its step',
         note='`train_iter` counts windows. With `trace_model=True` too.',
         # also after each batch of validation
         check=lambda a,b: [n for k,_,n in b.got if k=='train_loss']==[1,2,3,3,3, 4,5,6,6,6, 7,8,9,9,9]),
    case('Loggers', 'WandbCallback', metrics=acc, fit=entries, check=are_windows,
         compared='everything, and what is logged at each step, without `train_samples_per_sec`',
         note='It logs one entry per window. The axis `epoch` counts windows. In fastai 2.8.12 it has an error of its '
              'own (issue 4173), which we mend first.'))

scheds = dict(lr=combined_cos(.25, 1e-3, .1, 1e-5), mom=lambda pct: .95-.2*math.sin(math.pi*pct), wd=SchedCos(.1, 1e-3),
              sqr_mom=SchedPoly(.9, .99, 2))

@row('Loggers', 'ParamScheduler', 'everything, and what is set at each micro-batch',
     note='Your own schedules. A value is set at the start of a window and kept to its end.')
@each(drop_last=[False, True])
def test_param_scheduler(drop_last, works):
    def hypers(): return keep(lambda cb: [dict(h) for h in cb.opt.hypers] if cb.training else None, 'before_batch', 100)
    a,b = pair(lambda: [ParamScheduler(scheds), hypers()], drop_last=drop_last, fit=lambda learn: learn.fit(3))
    works(a, b)
    ws = windows(a.got, 3, n_micro=8 if drop_last else 10)   # a tail that is dropped does not begin
    works.same(ws, [[h]*len(w) for h,w in zip(b.got, ws)], 'set')
    assert set(b.recorder.hps)==set(scheds) and len(b.got)==len(b.recorder.hps['wd'])==len(ws)==(6 if drop_last else 9)

# Predictions

def draw(learn):
    learn.model[2].p = .5
    torch.manual_seed(0)
    res = [learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2)]
    learn.model[2].p = 0.
    return res
def dropping(): m = small_model(); return nn.Sequential(m[0], m[1], nn.Dropout(0.), m[2])

class Decoded(nn.CrossEntropyLoss):
    def activation(self, x): return x.softmax(-1)
    def decodes(self, x): return x.argmax(-1)

def explain(learn):
    for dl in learn.dls: dl.dataset.vocab = CategoryMap(list('abc'))
    tops = [Interpretation.from_learner(learn, i).top_losses(9) for i in (0,1)]
    clss = [ClassificationInterpretation.from_learner(learn, i) for i in (0,1)]
    return [c.confusion_matrix() for c in clss],tops,[[c.top_losses(largest=False), c.most_confused()] for c in clss]

def summed_up(learn):
    "The text of the summary without the batch size and our callback, before a fit and between two"
    says = lambda learn: re.sub(r'\b(8|32) x', 'n x', str(learn.summary())).replace('  - AccumulateStep\n', '').split()
    first = says(learn)
    again(lambda learn: [first, says(learn)])(learn)

between = 'Between two fits, on the training set and on the validation set.'
test_predictions = alike(
    case('Predictions', 'GatherPredsCallback, get_preds', compared='everything, predictions, targets and losses',
         fit=again(lambda l: [l.get_preds(with_loss=True, with_input=True, with_decoded=True),
                              l.get_preds(ds_idx=0, with_loss=True)]),
         note=between, check=lambda a,b: [len(o[0]) for o in b.got]==[24,76]),
    case('Predictions', 'Learner.validate', compared='everything, losses and metrics', note=between, metrics=acc,
         fit=again(lambda learn: [learn.validate(i) for i in (0,1)])),
    case('Predictions', 'FetchPredsCallback', compared='everything, and the predictions of each epoch', fit=three,
         *[dict(cbs=lambda i=i: [FetchPredsCallback(i, with_input=True),
                                 keep(lambda cb: cb.fetch_preds.preds, 'after_epoch')]) for i in (0,1)],
         note='On the training set and on the validation set.',
         check=lambda a,b: len(b.got)==3 and len(b.got[0][0])==(24 if b.fetch_preds.ds_idx else 76)),
    case('Predictions', 'MCDropoutCallback', compared='everything, and the predictions with one seed', model=dropping,
         note='Trained without dropout, because micro-batches draw other masks.', fit=again(draw),
         check=lambda a,b: not torch.equal(*b.got)),
    case('Predictions', 'Interpretation, ClassificationInterpretation', fit=again(explain), loss_func=Decoded(),
         compared='everything, top losses and the confusion matrix', note=between,
         check=lambda a,b: [o.sum() for o in b.got[0]]==[76,24]),
    case('Hooks', 'Learner.summary', compared='everything, and the text without the batch size and `AccumulateStep`',
         note='Before a fit and between two fits.', fit=summed_up))

@row('Predictions', 'CollectDataCallback', 'everything, and inputs, targets and predictions, joined for each window',
     note='It makes one entry per micro-batch, with its own loss. The last entry of a window has the loss of the '
          'window.')
def test_collect_data(works):
    a,b = pair(CollectDataCallback, fit=lambda learn: learn.fit(1))
    works(a, b)
    da,db = list(a.collect_data.data),list(b.collect_data.data)
    assert len(da)==10+2 and len(db)==3+2
    ws = windows(da[:10])
    works.same([[torch.cat([m[i] if i==2 else m[i][0] for m in w]) for i in range(3)]+[w[-1][3]] for w in ws],
               [[x[0],y[0],pred,loss] for x,y,pred,loss in db[:3]], 'data, and the loss of the window')
    inner = [m for w in ws for m in w[:-1]]
    works.same([m[3] for m in inner], [F.cross_entropy(m[2], m[1][0]) for m in inner], 'own loss')
    works.same(da[10:], db[3:], 'validation')

# Hooks

class Outputs(HookCallback):
    "What modules put out in training"
    def before_fit(self): self.outputs = []; super().before_fit()
    def hook(self, m, i, o):
        if self.training: self.outputs.append(o)

@row('Hooks', 'HookCallback, hook_outputs', 'everything, and activations, joined for each window',
     note='A hook is called for each micro-batch.')
def test_hooks(works):
    def fit(learn):
        with hook_outputs(learn.model) as hooks: learn.fit(2); learn.got = list(hooks.stored)
    a,b = pair(Outputs, fit=fit)
    works(a, b)
    works.same(a.got, b.got, 'stored')
    oa,ob = (l.outputs.outputs for l in (a,b))   # of two layers
    for i in range(2): works.same([torch.cat(w) for w in windows(oa[i::2], 2)], ob[i::2], f'layer {i}')
    assert len(ob)==2*2*3

# since its statistics are float32
@row('Hooks', 'ActivationStats', 'mean, near_zero and histogram for each window; the training itself to 1e-12',
     tol=TOL32,
     note='It makes one entry per micro-batch. `every` counts windows, and takes all their micro-batches.')
@each(every=[None, 2])
def test_activation_stats(every, works):
    a,b = pair(lambda: ActivationStats(every=every, with_hist=True), fit=lambda learn: learn.fit(2))
    assert_same(a, b)
    sa,sb = (list(l.activation_stats.stats) for l in (a,b))
    # of the windows 0 to 5, the tails 2 and 5 have a micro-batch of 8 samples and one of 4
    sizes = [[8,4] if i in (2,5) else [8]*4 for i in range(0, 6, every or 1)]
    assert len(sb)==len(sizes) and len(sa)==sum(map(len,sizes))
    for bs,big in zip(sizes,sb):
        micro = [sa.pop(0) for _ in bs]
        for layer in range(2):
            def mean(k): return sum(n*m[layer][k] for n,m in zip(bs,micro))/sum(bs)
            joined = dict(mean=mean('mean'), near_zero=mean('near_zero'), hist=sum(m[layer]['hist'] for m in micro))
            works.same(joined, {k:big[layer][k] for k in joined}, f'layer {layer}')
