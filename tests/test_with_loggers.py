"Trackers, loggers, predictions and hooks beside `AccumulateStep`"
import importlib.util,sys
from contextlib import redirect_stdout
from types import SimpleNamespace
import sklearn.metrics as skm
import fastai.callback.progress as fap
from fastai.callback.data import CollectDataCallback
from fastai.callback.preds import MCDropoutCallback
from fastai.interpret import ClassificationInterpretation,Interpretation
from fastai.metrics import F1Score,LossMetric,Perplexity,RocAuc,skm_to_fastai
from matrix import *

def acc(pred, targ): return (pred.argmax(-1)==targ).double().mean()   # fastai's `accuracy` is a float32 mean
def epochs(n, lr=.2): return lambda learn: learn.fit(n, lr)          # at a rate where the best epoch is not the last

def fields(text, sep=None):
    "What stands in `text`, numbers as numbers"
    def num(o):
        try: return float(o.rstrip('.'))
        except ValueError: return o
    return [num(o) for o in text.strip().split(sep)]

def said(fit):
    "`fit`, with what it prints kept in `learn.said`"
    def f(learn):
        with redirect_stdout(io.StringIO()) as out: fit(learn)
        learn.said = fields(out.getvalue())
    return f

class Watch(Callback):
    "Keep in `seen` what functions of events return, unless it is None"
    def __init__(self, order=0, **events):
        self.order,self.seen = order,[]
        for name,f in events.items(): setattr(self, name, partial(self.keep, f))
    def keep(self, f):
        if (res := f(self)) is not None: self.seen.append(res)

def windows(o, n_epoch=1, size=4, n_micro=10):
    "The entries of `o`, one a micro-batch, by window"
    o = list(o)
    assert len(o)==n_epoch*n_micro
    return [o[e*n_micro:(e+1)*n_micro][i:i+size] for e in range(n_epoch) for i in range(0, n_micro, size)]

def joined(ws): return [torch.cat(w) for w in ws]

# Trackers

early = {}, dict(patience=3), dict(monitor='acc', min_delta=.1, patience=2), dict(monitor='train_loss')

@row('Trackers', 'EarlyStoppingCallback', 'everything, and what it prints', note='It stops at the same epoch.')
@each(kw=early)
def test_early_stopping(kw, works):
    a,b = pair(lambda: EarlyStoppingCallback(**kw), metrics=acc, fit=said(epochs(8)))
    works(a, b)
    works.same([a.epoch,a.said], [b.epoch,b.said], 'said')
    assert 2<=b.epoch<7 and 'stopping' in b.said, 'was to stop early'

save = [dict(monitor='acc'), dict(with_opt=True), dict(every_epoch=True), dict(every_epoch=2, with_opt=True),
        dict(at_end=True)]

@row('Trackers', 'SaveModelCallback', 'everything, each file, and what it prints',
     note='The best model, `every_epoch` and `at_end`, each with and without the optimizer.')
@each(kw=save)
def test_save_model(kw, works, tmp_path):
    shutil.rmtree(tmp_path/'models', ignore_errors=True)
    names = iter('ab')
    a,b = pair(lambda: SaveModelCallback(fname=next(names), **kw), metrics=acc, path=tmp_path, fit=said(epochs(5)))
    works(a, b)
    works.same(a.said, b.said, 'said')
    fa,fb = ({f.stem[1:]:torch.load(f, weights_only=False) for f in sorted((tmp_path/'models').glob(f'{k}*.pth'))}
             for k in 'ab')
    works.same(fa, fb, 'file')
    assert len(fb)==({True:5,2:3}.get(kw.get('every_epoch'), 1))
    assert all(set(f)=={'model','opt'} for f in fb.values())==kw.get('with_opt', False)

@row('Trackers', 'ReduceLROnPlateau', 'everything, and what it prints', note='Each step has the same learning rates.')
@each(kw=[{}, dict(monitor='acc', patience=2, factor=3., min_delta=.05, min_lr=.05)])
def test_reduce_lr(kw, works):
    a,b = pair(lambda: ReduceLROnPlateau(**kw), metrics=acc, fit=said(epochs(6)))
    works(a, b)
    works.same(a.said, b.said, 'said')
    assert len(set(b.recorder.lrs))>1, 'was to reduce the rate'

@row('Trackers', 'TerminateOnNaNCallback', 'weights, losses and learning rates',
     note='It stops after the window with the NaN, as it stops after the large batch.')
@each(at=[4,7])
def test_terminate_on_nan(at, works):
    x = features(76)
    x[at*8:at*8+8] = math.nan   # micro-batch `at`, in the second window
    a,b = pair(TerminateOnNaNCallback, dls=partial(make_dls, x=x, shuffle=False), fit=epochs(3))
    works.same([a.recorder.losses, a.recorder.lrs, a.epoch, a.iter],
               [b.recorder.losses, b.recorder.lrs, b.epoch, b.iter], 'recorder')
    works.same(weights(a), weights(b), 'weights')
    assert all(p.isnan().all() for p in b.model[-1].parameters()) and len(b.recorder.losses)==1

# Loggers

@row('Loggers', 'CSVLogger', 'everything, and the file without the times', note='With `append=True` too.')
@each(append=[False, True])
def test_csv_logger(append, works, tmp_path):
    for o in tmp_path.glob('*.csv'): o.unlink()
    names = iter(['a.csv','b.csv'])
    def fit(learn): learn.fit(3); learn.fit_one_cycle(2)
    a,b = pair(lambda: CSVLogger(next(names), append=append), metrics=acc, path=tmp_path, fit=fit)
    works(a, b)
    fa,fb = ([fields(l, ',') for l in (tmp_path/f).read_text(encoding='utf-8').splitlines()] for f in ('a.csv','b.csv'))
    works.same([l[:-1] for l in fa], [l[:-1] for l in fb], 'file')
    assert fb[0]==['epoch','train_loss','valid_loss','acc','time'] and len(fb)==(7 if append else 3)

def bars(learn):
    "A bar that keeps what it is told: lines, and points of the graph"
    learn.lines,learn.graphs = [],[]
    class Master(fap.master_bar):
        def write(self, line, table=False):
            learn.lines.append([fields(o) for o in line[:-1]])
            super().write(line, table)
        def update_graph(self, *args): learn.graphs.append(deepcopy(args)); super().update_graph(*args)
    return Master

@row('Loggers', 'ProgressCallback, ShowGraphCallback',
     'everything, the graph and its bounds, the comment at each step, and the lines without the times',
     note='The bar moves at each micro-batch.')
def test_progress_and_graph(works, monkeypatch):
    def fit(learn):
        learn.logger = print
        learn.add_cbs([ProgressCallback(), ShowGraphCallback()])   # here, since `make_learner` removes bars
        with monkeypatch.context() as m:
            m.setattr(fap, 'master_bar', bars(learn))
            learn.fit(3)
    a,b = pair(lambda: Watch(61, after_batch=lambda cb: cb.progress.pbar.comment if cb.training else None), metrics=acc,
               fit=fit)
    works(a, b)
    works.same(a.graphs, b.graphs, 'graph')
    assert a.watch.seen==b.watch.seen and len(b.watch.seen)==9   # four digits
    assert a.lines==b.lines and len(b.lines)==1+3 and len(b.graphs)==3   # six digits

class HalfLoss(nn.CrossEntropyLoss):
    "A loss that keeps a part of itself, as `LossMetric` reads it"
    def forward(self, *args): res = super().forward(*args); self.half = res.detach()/2; return res

@row('Loggers', 'Recorder(train_metrics=True)',
     note='Metrics that are functions, metrics of the loss or its parts, and metrics of all predictions. Each '
          'micro-batch counts with its own loss.')
@each(valid=[True, False], drop_last=[False, True])
def test_recorder_of_train_metrics(drop_last, valid, works):
    metrics = [acc, AvgLoss(), Perplexity(), LossMetric('half'), F1Score(average='macro'),
               skm_to_fastai(skm.cohen_kappa_score), RocAuc(multi_class='ovr'),
               AccumMetric(lambda p,t: F.cross_entropy(p, t), name='ce', flatten=False)]
    def fit(learn): learn.recorder.train_metrics,learn.recorder.valid_metrics = True,valid; learn.fit_one_cycle(3)
    a,b = pair(metrics=metrics, loss_func=HalfLoss(), drop_last=drop_last, fit=fit)
    works(a, b)
    names = list(b.recorder.metric_names[1:])
    assert names==list(a.recorder.metric_names[1:]) and len(b.recorder.values[0])==len(names)-1==(18 if valid else 9)
    half,ce = ([v[names.index(f'train_{n}' if valid else n)] for v in a.recorder.values] for n in ('half','ce'))
    assert half==pytest.approx([o/2 for o in ce], rel=TOL)

scheds = dict(lr=combined_cos(.25, 1e-3, .1, 1e-5), mom=lambda pct: .95-.2*math.sin(math.pi*pct), wd=SchedCos(.1, 1e-3),
              sqr_mom=SchedPoly(.9, .99, 2))

@row('Loggers', 'ParamScheduler', 'everything, and what is set at each micro-batch',
     note='Your own schedules. A value is set at the start of a window and kept to its end.')
@each(drop_last=[False, True])
def test_param_scheduler(drop_last, works):
    hypers = lambda: Watch(100, before_batch=lambda cb: [dict(h) for h in cb.opt.hypers] if cb.training else None)
    a,b = pair(lambda: [ParamScheduler(scheds), hypers()], drop_last=drop_last, fit=lambda learn: learn.fit(3))
    works(a, b)
    ha,hb,n = a.watch.seen,b.watch.seen,8 if drop_last else 10   # a tail that is dropped does not begin
    for i,w in enumerate(windows(ha, 3, n_micro=n)): works.same(w, [hb[i]]*len(w), f'set[{i}]')
    assert set(b.recorder.hps)==set(scheds) and len(hb)==len(b.recorder.hps['wd'])==(6 if drop_last else 9)

@pytest.fixture
def fat():
    pytest.importorskip('tensorboard', reason='logs to tensorboard, which is not installed')
    import fastai.callback.tensorboard as fat
    return fat

@row('Loggers', 'TensorBoardCallback', 'everything, and each scalar with its step',
     note='`train_iter` counts windows. With `trace_model=True` too.')
def test_tensorboard(fat, works, tmp_path, monkeypatch):
    class Writer(fat.SummaryWriter):
        def __init__(self, *args, **kwargs): self.scalars = []; super().__init__(*args, **kwargs)
        def add_scalar(self, tag, v, step): self.scalars.append([tag,v,step]); super().add_scalar(tag, v, step)
    monkeypatch.setattr(fat, 'SummaryWriter', Writer)
    names = iter('ab')
    a,b = pair(lambda: fat.TensorBoardCallback(tmp_path/next(names), trace_model=True, log_preds=False), metrics=acc,
               fit=lambda l: l.fit_one_cycle(3))
    works(a, b)
    sa,sb = (l.tensor_board.writer.scalars for l in (a,b))
    works.same(sa, sb, 'scalars')
    # also after each batch of validation
    assert [s for tag,_,s in sb if tag=='train_loss']==[1,2,3,3,3, 4,5,6,6,6, 7,8,9,9,9]

@pytest.fixture
def faw(monkeypatch, tmp_path):
    "`fastai.callback.wandb`, with a run without network in `tmp_path`"
    wandb = pytest.importorskip('wandb', reason='logs to W&B, whose package wandb is not installed')
    for k,v in dict(MODE='offline', DIR=str(tmp_path), SILENT='true', CONSOLE='off').items():
        monkeypatch.setenv(f'WANDB_{k}', v)
    import fastai.callback.wandb as faw
    monkeypatch.setattr(faw.WandbCallback, '_wandb_watch_called', False)
    yield faw
    wandb.finish(); wandb.teardown()

@row('Loggers', 'WandbCallback',
     note='An error of fastai 2.8.12 itself (its issue 4173), with and without accumulation.')
def test_wandb(faw, works):
    if not hasattr(faw, 'init_args'):
        pytest.skip('this release of fastai does not call `init_args`, where the error of 2.8.12 is')
    faw.wandb.init(project='p')
    with works.refused(TypeError, match='vars'): pair(lambda: faw.WandbCallback(log_preds=False))
    with pytest.raises(TypeError, match='vars'):
        make_learner(make_dls(76, 32), cbs=faw.WandbCallback(log_preds=False)).fit(1)

@row('Loggers', 'WandbCallback, repaired',
     'everything, and what is logged at each step, without `train_samples_per_sec`',
     note='It logs one entry per window. The axis `epoch` counts windows.')
def test_wandb_mended(faw, works, monkeypatch):
    # where its error is
    monkeypatch.setattr(faw, 'init_args', lambda o: init_args(o) if hasattr(o, '__dict__') else {}, raising=False)
    def fit(learn):
        learn.logged = []
        run = faw.wandb.init(project='p')
        def log(d, step=None): learn.logged.append([step,dict(d)]); run.log(d, step=step)
        monkeypatch.setattr(faw.wandb, 'log', log)   # `init` has set it
        learn.fit_one_cycle(3); learn.fit(1)
        faw.wandb.finish()
    a,b = pair(lambda: faw.WandbCallback(log_preds=False), metrics=acc, fit=fit)
    works(a, b)
    time = 'train_samples_per_sec'
    la,lb = ([[s,{k:v for k,v in d.items() if k!=time}] for s,d in l.logged] for l in (a,b))
    works.same(la, lb, 'logged')
    assert len(lb)==4*(3*2+2)+2 and sum('raw_loss' in d for _,d in lb)==12
    assert all(d[time]>0 for _,d in a.logged if time in d)
    assert [d['epoch'] for _,d in a.logged
            if 'epoch' in d]==pytest.approx([e+f for e in range(4) for f in (1/3,2/3,1,1)])

class Service:
    "Stands in for a service that is not installed, and keeps what it is sent"
    parent = None
    def __init__(self, **kwargs): self.logged = []
    def log(self, name, v): self.logged.append([name,v])
    log_metric = log
    def log_parameter(self, name, v): pass
    def log_asset(self, *args): pass
    def log_text(self, *args): pass
    def end(self): pass
    @property
    def values(self): return [o for o in self.logged if not o[0].endswith('time')]

def load(monkeypatch, name, **modules):
    "A new `fastai.callback.{name}` with stand-ins for the modules of its service"
    for k,v in modules.items(): monkeypatch.setitem(sys.modules, k.replace('__','.'), SimpleNamespace(**v))
    spec = importlib.util.find_spec(f'fastai.callback.{name}')
    res = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(res)
    return res

@row('Loggers', 'CometCallback', note='An error of fastai 2.8.12 itself, with and without accumulation.')
def test_comet(works, monkeypatch):
    comet = load(monkeypatch, 'comet', comet_ml=dict(Experiment=Service))
    for cbs in [],[AccumulateStep(4)]:
        with works.refused(NameError, match='keep_experiment_running'):
            make_learner(make_dls(76, 8), cbs=[*cbs, comet.CometCallback('p')])

def comet(monkeypatch):
    module = load(monkeypatch, 'comet', comet_ml=dict(Experiment=Service))
    module.keep_experiment_running = False
    return partial(module.CometCallback, 'p', log_model_weights=False),lambda learn: learn.comet.experiment

def azure(monkeypatch):
    module = load(monkeypatch, 'azureml',
                  azureml__core__run=dict(Run=SimpleNamespace(get_context=lambda allow_offline: Service())),
                  azureml__exceptions=dict(RunEnvironmentException=Exception), azureml={}, azureml__core={})
    return module.AzureMLCallback,lambda learn: learn.azure_ml.azurerun

sends = partial(row, 'Loggers', compared='everything, and what is sent, without the times')
stand_in = 'A stand-in replaces the service.'
@pytest.mark.parametrize('service', [pytest.param(azure, marks=sends('AzureMLCallback', note=stand_in)),
    pytest.param(comet, marks=sends('CometCallback, repaired',
        note=f'With `fastai.callback.comet.keep_experiment_running = False`. {stand_in}'))])
def test_services(service, works, monkeypatch, tmp_path):
    "At each of three steps an epoch, and each epoch"
    monkeypatch.chdir(tmp_path)   # where one would write `outputs/model_summary.txt`
    make,sent = service(monkeypatch)
    a,b = pair(make, metrics=acc, fit=lambda l: l.fit_one_cycle(3))
    works(a, b)
    works.same(sent(a).values, sent(b).values, 'sent')
    logged = sent(b).logged
    assert [v for k,v in logged if k=='batch__train_iter']==list(range(1,10))
    assert sum(k=='epoch__acc' for k,_ in logged)==3

# Predictions

def again(f):
    "Fit, keep what `f` gets from the learner as `got`, and fit again"
    def fit(learn): learn.fit_one_cycle(2); learn.got = f(learn); learn.fit_one_cycle(1)
    return fit

gets = dict(with_loss=True, with_input=True, with_decoded=True), dict(ds_idx=0, with_loss=True)

@row('Predictions', 'GatherPredsCallback, get_preds', 'everything, predictions, targets and losses',
     note='Between two fits, on the training set and on the validation set.')
@each(kw=gets)
def test_get_preds(kw, works):
    a,b = pair(fit=again(lambda learn: learn.get_preds(**kw)))
    works(a, b)
    works.same(a.got, b.got, 'preds')
    assert len(b.got[0])==(76 if kw.get('ds_idx')==0 else 24)

@row('Predictions', 'Learner.validate', 'everything, losses and metrics',
     note='Between two fits, on the training set and on the validation set.')
def test_validate(works):
    a,b = pair(metrics=acc, fit=again(lambda learn: [learn.validate(i) for i in (0,1)]))
    works(a, b)
    works.same(a.got, b.got, 'validate')

@row('Predictions', 'FetchPredsCallback', 'everything, and the predictions of each epoch',
     note='On the training set and on the validation set.')
@each(ds_idx=[0, 1])
def test_fetch_preds(ds_idx, works):
    a,b = pair(lambda: [FetchPredsCallback(ds_idx, with_input=True),
                        Watch(after_epoch=lambda cb: cb.fetch_preds.preds)], fit=lambda l: l.fit_one_cycle(3))
    works(a, b)
    works.same(a.watch.seen, b.watch.seen, 'preds')
    assert len(b.watch.seen)==3 and len(b.watch.seen[0][0])==(24 if ds_idx else 76)

def dropping(): m = small_model(); return nn.Sequential(m[0], m[1], nn.Dropout(0.), m[2])

@row('Predictions', 'MCDropoutCallback', 'everything, and the predictions with one seed',
     note='Trained without dropout, because micro-batches draw other masks.')
def test_mc_dropout(works):
    def draw(learn):
        learn.model[2].p = .5
        torch.manual_seed(0)
        res = [learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2)]
        learn.model[2].p = 0.
        return res
    a,b = pair(model=dropping, fit=again(draw))
    works(a, b)
    works.same(a.got, b.got, 'preds')
    assert not torch.equal(*b.got), 'dropout was off'

@row('Predictions', 'CollectDataCallback', 'everything, and inputs, targets and predictions, joined for each window',
     note='It makes one entry per micro-batch, with its own loss. The last entry of a window has the loss of the '
          'window.')
def test_collect_data(works):
    a,b = pair(CollectDataCallback, fit=lambda learn: learn.fit(1))
    works(a, b)
    data = a.collect_data.data
    assert len(data)==10+2 and len(b.collect_data.data)==3+2
    ws = windows(data[:10])
    works.same([[torch.cat([m[i] if i==2 else m[i][0] for m in w]) for i in range(3)] for w in ws],
               [[x[0],y[0],pred] for x,y,pred,_ in b.collect_data.data[:3]], 'data')
    works.same([w[-1][3] for w in ws], [o[3] for o in b.collect_data.data[:3]], 'loss of the window')
    inner = [m for w in ws for m in w[:-1]]
    works.same([m[3] for m in inner], [F.cross_entropy(m[2], m[1][0]) for m in inner], 'own loss')
    works.same(list(data[10:]), list(b.collect_data.data[3:]), 'validation')

class Decoded(nn.CrossEntropyLoss):
    def activation(self, x): return x.softmax(-1)
    def decodes(self, x): return x.argmax(-1)

@row('Predictions', 'Interpretation, ClassificationInterpretation', 'everything, top losses and the confusion matrix',
     note='Between two fits, on the training set and on the validation set.')
@each(ds_idx=[0, 1])
def test_interpretation(ds_idx, works):
    def explain(learn):
        for dl in learn.dls: dl.dataset.vocab = CategoryMap(list('abc'))
        top = Interpretation.from_learner(learn, ds_idx).top_losses(9)
        cls = ClassificationInterpretation.from_learner(learn, ds_idx)
        return [*top, *cls.top_losses(largest=False), cls.confusion_matrix(), cls.most_confused()]
    a,b = pair(loss_func=Decoded(), fit=again(explain))
    works(a, b)
    works.same(a.got, b.got, 'interpretation')
    assert b.got[4].sum()==(24 if ds_idx else 76)

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
        with hook_outputs(learn.model) as hooks: learn.fit(2); learn.stored = list(hooks.stored)
    a,b = pair(lambda: Outputs(), fit=fit)
    works(a, b)
    works.same(a.stored, b.stored, 'stored')
    for i in range(2): works.same(joined(windows(a.outputs.outputs[i::2], 2)), b.outputs.outputs[i::2], f'layer {i}')
    assert len(b.outputs.outputs)==2*2*3

# since its statistics are float32
@row('Hooks', 'ActivationStats', 'mean, near_zero and histogram for each window; the training itself to 1e-12',
     tol=TOL32,
     note='It makes one entry per micro-batch. `every` counts windows, and takes all their micro-batches.')
@each(every=[None, 2])
def test_activation_stats(every, works):
    a,b = pair(lambda: ActivationStats(every=every, with_hist=True), fit=lambda learn: learn.fit(2))
    assert_same(a, b)
    sa,sb = (l.activation_stats.stats for l in (a,b))
    # of the windows 0 to 5, the tails 2 and 5 have a micro-batch of 8 samples and one of 4
    ws = [i for i in range(6) if i%(every or 1)==0]
    sizes = [[8,4] if i in (2,5) else [8]*4 for i in ws]
    assert len(sb)==len(ws) and len(sa)==sum(map(len,sizes))
    sa = iter(sa)
    for bs,big in zip(sizes,sb):
        micro = [next(sa) for _ in bs]
        for layer in range(2):
            for k in ('mean','near_zero'):
                works.same(sum(n*m[layer][k] for n,m in zip(bs,micro))/sum(bs), big[layer][k], f'{k} of layer {layer}')
            works.same(sum(m[layer]['hist'] for m in micro), big[layer]['hist'], 'hist')

@row('Hooks', 'Learner.summary', 'everything, and the text without the batch size and `AccumulateStep`',
     note='Before a fit and between two fits.')
def test_summary(works):
    def fit(learn):
        learn.said = [str(learn.summary())]
        again(lambda learn: learn.said.append(str(learn.summary())))(learn)
    a,b = pair(fit=fit)
    works(a, b)
    for x,y in zip(a.said, b.said):
        assert x.replace('8 x','32 x').replace('  - AccumulateStep\n', '').split()==y.split() and 'AccumulateStep' in x
