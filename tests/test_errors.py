"Bad input is refused with the argument, the value and what to do, before any weight has moved"
import harness
from nets import *
from kinds import Odd
from fastai_accum.all import *
from fastai_accum.core import accumulation_settings

def learner(*cbs, n=64, bs=8, dls=None, **kwargs): return make_learner(dls or make_dls(n, bs), cbs=cbs, **kwargs)

acc,cut,every = AccumulateStep,MicroBatch,turn_on_accumulation
an_int = 'must be an int of at least 1'
values = [
    *((partial(acc, **{k:v}), f'AccumulateStep: {k} {an_int}, got {re.escape(repr(v))}')
      for k,v in itertools.product(['n_step','n_samples'], [0, -1, 2.5, 4., '4', True, [4], math.nan])),
    *((partial(acc, 1, **{k:v}), f'AccumulateStep: {k} must be True, False or None, got {v!r}')
      for k,v in (('average',1),('average','mean'),('drop_last',0))),
    (partial(acc, 1, weight=1.), 'AccumulateStep: weight must be a function'),
    *((partial(acc, n, n_samples=k), f'give either n_step, which counts micro-batches, or n_samples, .*got n_step={n} '
                                     f'and n_samples={k}') for n,k in ((4,32),(None,None))),
    *((partial(cut, **{'bs':8, k:v}), f'MicroBatch: .*{msg}') for k,v,msg in [
        ('bs',0,f'bs {an_int}'), ('bs',2.5,'bs must be'), ('bs',True,'bs must be'), ('bs','big',"or 'auto', got 'big'"),
        ('coupled',1,'coupled must be True or False, got 1'), ('valid',None,'valid must be'),
        ('prove','no',"prove must be True or False, got 'no'"), ('split',3,'split must be a function'),
        ('weight',3,'weight must be a function')]),
    (lambda: learner(acc), 'give either n_step'),
    (partial(acc, [1,2,4]), 'pass a function `pct -> int`'),
    *((f, "AccumulateStep: n_step must be .*function of one argument, `pct`, .*; got one of [(]epoch, step[)]")
      for f in (lambda: acc(lambda epoch, step: 4), lambda: every(lambda epoch, step: 4))),
    (partial(acc, n_samples=lambda: 4), 'AccumulateStep: n_samples must be .*; got one of [(][)]'),
    (partial(acc, {0:1, 4:4}), 'got {0: 1, 4: 4}; .*pass a function `pct -> int`'),
    (lambda: acc(learner()), r'got Learner; write learn.accumulate\(4\)'),
    (lambda: cut(learner()), r'got Learner; write learn.micro_batch\(4\)'),
    (lambda: learner().check_accumulation(acc(4)),
     r'got AccumulateStep; add it to the learner: `learn.add_cb\(AccumulateStep\(n_step=4'),
    *((partial(f, acc(4)), 'got AccumulateStep; write its `.n_step`') for f in (acc,every))]   # it is no schedule

counts_steps = """n_steps nsteps acc_steps accum accumulation_steps accumulate_grad_batches n_batches num_steps
gradient_accumulation_steps grad_accum_steps update_freq every_k_schedule n_acc n_micro""".split()
names = [
    *((partial(f, **{k:v}), match.replace('AccumulateStep', f.__name__)) for f in (acc,every) for k,v,match in [
        *((k,4,rf"AccumulateStep: .* '{k}'. Did you mean `AccumulateStep\(n_step=4\)`") for k in counts_steps),
        ('n_acc',64,r'or `AccumulateStep\(n_samples=64\)`'),
        ('batch_size',64,r'Did you mean `AccumulateStep\(n_samples=64\)`'),
        ('accum_bs',64,r'Did you mean `AccumulateStep\(n_samples=64\)`'),
        ('bs',8,r'`MicroBatch\(bs=8\)`'), ('exact',True,r'`MicroBatch\(exact=True\)`'),
        ('nonsense',1,"no argument 'nonsense'. The arguments are n_step, n_samples")]),
    *((partial(cut, **{k:v}), match) for k,v,match in [
        *((k,8,r'Did you mean `MicroBatch\(bs=8\)`') for k in ('slice','batch_size')),
        ('exat',True,r'Did you mean `MicroBatch\(exact=True\)`'), ('n_steps',4,r'`AccumulateStep\(n_step=4\)`')]),
    # what a second argument without a name means, nobody can tell
    (partial(cut, 8, True), r'without a name.*Example: `cbs=MicroBatch\(16'),
    (partial(acc, 8, 64), r'without a name.*Example: `Learner\(')]

wrong_calls = [
    (lambda: learner().accumulate(n_stpe=4),
     r"learn.accumulate: there is no argument 'n_stpe'. Did you mean `learn.accumulate\(n_step=4\)`"),
    (lambda: learner().gradient_checkpointing(every=2),
     r'are blocks, room. Example: `learn.gradient_checkpointing\(\)'),
    (lambda: GradientCheckpointing(every=2),
     "GradientCheckpointing: .* no argument 'every'. .* are blocks, room. Example: `cbs=GradientCheckpointing"),
    (lambda: OffloadActivations(pin_memory=True),
     "no argument 'pin_memory'. The arguments are room. Example: `cbs=OffloadActivations"),
    (lambda: learner().check_accumulation(n_step=4), r'The arguments are bs. Example: `learn.check_accumulation\(\)`'),
    (lambda: learner().what_fits(gpu=0), r"The arguments are budget. Example: `learn.what_fits\('8GB'\)`"),
    (lambda: learner().n_steps(n_epochs=3), r'Did you mean `learn.n_steps\(n_epoch=3\)`'),
    *((lambda k=k: learner().noise_scale(**{k:64}), f"no argument '{k}'. The arguments are n_step, num_it, show_plot")
      for k in ('bs','batch_size')),
    (lambda: learner(every(4)), r'is no callback .* `learn.accumulate\(n_step=4\)`'),
    (lambda: learner().fit(1, cbs=[every(4)]), 'is no callback')]

@each(case=[*((ValueError,*o) for o in values), *((TypeError,*o) for o in names),
            *((TypeError, *o) for o in wrong_calls)])
def test_arguments(case):
    exc,f,match = case
    with pytest.raises(exc, match=match): f()
    assert accumulation_settings() is None

def test_warnings_name_the_line(recwarn):
    "Of the user, and of nobody's library; a block that is none warns"
    accumulation(4)
    learner(acc(n_samples=4)).fit(1)
    learner(cut(16)).fit(1)
    assert {Path(o.filename).name for o in recwarn}=={'test_errors.py'} and len(recwarn)==3
    assert 'write `with accumulation(n_step=4)' in str(recwarn[0].message)

def test_integers_of_numpy(): assert acc(np.int64(4)).n_step==4 and type(cut(np.int64(5)).bs) is int

def refused(learn, *args, **kwargs):
    "The error names only callbacks of the learner"
    said = harness.refused(learn, *args, **kwargs)
    assert learn.cbs.filter(risinstance(acc)) or 'AccumulateStep' not in said

def ce(reduction): return partial(F.cross_entropy, reduction=reduction)
def unreduced(pred, targ): return F.cross_entropy(pred, targ, reduction='none')
def weighs(v): return [acc(4, weight=lambda pred, targ: v)]
def later(cb, **kwargs): vars(cb).update(kwargs); return [cb]   # is checked when the fit begins

@each(case=[
    ([acc(4)], dict(loss_func=nn.CrossEntropyLoss(reduction='none')), "reduction='none'"),
    ([acc(4)], dict(loss_func=ce('none')), "reduction='none'"),
    ([acc(4)], dict(loss_func=unreduced), 'scalar outputs', RuntimeError),
    ([cut(8)], dict(bs=32, loss_func=nn.CrossEntropyLoss(reduction='none')), "MicroBatch.*reduction='none'"),
    ([cut(8, weight=lambda p, y: torch.ones(len(y)))], dict(bs=32), 'MicroBatch.*weight must return'),
    *((weighs(torch.tensor(v)), {}, f'weight must return .*got {v}') for v in (-1., math.nan, math.inf)),
    *((weighs(v), {}, 'weight must return .* or a tuple of two, got')
      for v in (torch.ones(3), None, '3', True, torch.tensor(True), [1,2], (1,-1), (1,1,1))),
    *(([acc(drop_last=True, **kw)], dict(n=n), f'more than the {k} of an epoch and the tail is dropped')
      for kw,n,k in [(dict(n_step=9),64,8), (dict(n_samples=65),64,64), (dict(n_step=lambda pct: 9),64,8),
                     (dict(n_step=4),6,1)]),
    *(([acc(lambda pct, v=v: 2 if pct<.5 else v)], {}, rf'n_step at pct=0\.5 must be an int of at least 1 .* {v!r}')
      for v in (0, -1, 2.5, 2., True, None, '3')),   # in the second epoch, and before the first step
    *(([acc(2)], dict(loss_func=torch.jit.script(f)), 'compiled by TorchScript.*or weight=')
      for f in (nn.CrossEntropyLoss(weight=torch.ones(3).double()),F.cross_entropy)),
    *((later(acc(4), **{k:v}), {}, match) for k,v,match in [
        ('n_step',0,f'AccumulateStep: n_step {an_int}, got 0'), ('n_samples',64,'give either n_step'),
        ('average','mean','average must be')]),
    (later(cut(4), bs=0), {}, f'MicroBatch: bs {an_int}'),
    (later(cut(4), coupled=1), {}, 'coupled must be'),
    *(([f(4)], dict(dls=make_dls(4, 8, drop_last=True)), f'{f.__name__}: .*no training')
      for f in (acc,cut)),
    *(([f(), f()], {}, f'{f.__name__}: .*this callback twice in cbs; keep one .`learn\\.[a-z]+_[a-z]+')
      for f in (GradientCheckpointing,OffloadActivations))])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_refused_by_a_fit(case):
    "Of windows that never step, `n_steps` says the same"
    cbs,kw,*match = case
    refused(learn := learner(*cbs, **kw), *match, fit=lambda l: l.fit(2))
    if 'is dropped' in match[0]:
        with pytest.raises(ValueError, match=match[0]): learn.n_steps(2)

def trains(learn, bs=32):
    "After a refusal nothing is lost: `learn` trains as the large batch"
    big = learner(bs=bs)
    for l in (learn,big): l.fit(1)
    assert_same(learn, big)

@each(cls=[acc,cut])
def test_added_twice(cls):
    learn = learner(cls(4), cls(2))
    for f in Learner.fit,Learner.n_steps: refused(learn, 'this callback (twice|2 times)', fit=partial(f, n_epoch=1))
    cb = cls(4)
    learn = learner(cb)
    refused(learn, f'{cls.__name__}: .*(twice|2 times)', fit=lambda l: l.fit(1, cbs=cb))
    refused(learn, 'add it anew')   # fastai has removed one of the two
    learn.remove_cb(cb).add_cb(cls(4))
    refused(learn, 'have this callback (twice|2 times)', fit=lambda l: l.fit(1, cbs=cls(2)))
    trains(learn, 32 if cls is acc else 8)

@each(cls=[GradientAccumulation, type('Own', (GradientAccumulation,), {})])
def test_together_with_fastais(cls):
    learn = learner(cls(32), acc(4))
    refused(learn, 'remove_cb.GradientAccumulation')
    trains(learn.remove_cb(cls))

def test_the_methods_replace():
    learn = learner().accumulate(2).accumulate(n_samples=32, drop_last=True)
    cb, = learn.cbs.filter(risinstance(acc))
    assert learn.accumulate_step is cb and (cb.n_step,cb.n_samples,cb.drop_last)==(None,32,True)
    with pytest.raises(ValueError, match='n_step'): learn.accumulate(0)
    assert learn.accumulate_step is cb
    learn.micro_batch(4).micro_batch(8)
    assert [o.bs for o in learn.cbs.filter(risinstance(cut))]==[8]
    saves = GradientCheckpointing,OffloadActivations
    for _ in range(2): learn.gradient_checkpointing([learn.model[0]]).offload_activations()
    assert [type(o) for o in learn.cbs if isinstance(o, saves)]==list(saves) and learn.checkpointing.blocks

@each(weight=[lambda y: len(y), lambda: 1, lambda pred, y, z: 1, lambda pred, *, y: 1, len], cls=[acc,cut])
def test_weight_of_another_signature(cls, weight):
    with pytest.raises(TypeError) as e: learner(cls(4, weight=weight)).fit(1)
    notes = ' '.join(e.value.__notes__)
    assert f'{cls.__name__}: ' in notes and 'weight(pred, *yb)' in notes

def test_nothing_is_wrong_without_training():
    learn = learner(acc(9, drop_last=True))
    learn.validate(); learn.get_preds()

def normed(norm): return nn.Sequential(nn.BatchNorm1d(6) if norm else nn.Dropout(), nn.Linear(6,3)).double()
def dropping(n): return dict(dls=make_dls(n, 8, drop_last=True, x=features(n), y=classes(n)))
below,uncut = '4 samples are fewer than the batch size 8','bs={} is not below.* 16 .*no batch of the training is cut'
said = [   # callbacks, arguments of `learner`, what is said, and how often in two fits of two epochs
    (lambda: acc(9), {}, 'a window of 9 micro-batches is more than the 8 of an epoch.*each epoch makes one step', 2),
    # also at the beginning of a schedule: each micro-batch is a window
    (lambda: acc(n_samples=4), {}, below, 2), (lambda: acc(n_samples=lambda pct: 4 if pct<.5 else 64), {}, below, 2),
    # not to add what is there
    *((lambda n=n: cut(n), dict(bs=16), f'{uncut.format(n)}.*add AccumulateStep', 2) for n in (64,16)),
    *((lambda n=n: [cut(n), acc(2)], dict(bs=16), f'{uncut.format(n)}(?!.*AccumulateStep)', 2) for n in (64,16)),
    # of exact slices only where a batch norm keeps activations
    *((f, dict(bs=16, model=normed(norm)), 'a CPU, so it saves no memory here', n) for norm in (True,False) for f,n in [
        (lambda: cut(8, exact=True),norm), (lambda: cut(exact=True),norm), (lambda: cut(8, coupled=True),0),
        (OffloadActivations,1)]),
    # if more than 5 % of an epoch's samples reach no step
    (lambda: acc(4), dropping(124), '(24|28) of the (120|124) samples.*reach no step.*drop_last=False', 2),
    (lambda: acc(4), dropping(1288), 'reach no step', 0)]

@each(case=said)
def test_what_is_said(case, capsys):
    cbs,kw,words,n = case
    capsys.readouterr()
    learn = learner(*L(cbs()), **kw)
    with warnings.catch_warnings(record=True, action='always') as ws:
        for _ in range(2): learn.fit(2)
    all_said = [*(str(o.message) for o in ws), *capsys.readouterr().out.splitlines()]
    assert sum(bool(re.search(words, o)) for o in all_said)==n, all_said

def test_a_window_below_the_batch():
    with pytest.warns(UserWarning, match=below): trains(learner(acc(n_samples=4)), 8)

def test_a_loss_that_sums():
    "`reduction` on a function of one's own says that it sums"
    def loss(p, y): return ce('sum')(p, y)
    loss.reduction = 'sum'
    same(lambda: cut(8), 32, loss_func=loss)

@each(case=[(8, acc(4)), (32, cut(8)), (32, cut(8, exact=True)), (32, acc(1))])
def test_a_step_in_the_backward_pass(case):
    "An optimizer that steps in hooks would step once per micro-batch: the first window refuses it by name"
    bs,cb = case
    learn = learner(cb, bs=bs)
    hooks = steps_in_backward(learn.model)
    with pytest.raises(RuntimeError, match=f'{cb}: .*no parameter has a gradient.*one optimizer'): learn.fit(1)
    for h in hooks: h.remove()
    learn.fit(1)

def test_the_line_of_a_subclass():
    "`learn.micro_batch` makes a `MicroBatch`, so the line has all that this needs"
    class Mine(MicroBatch):
        def __init__(self, bs=4): super().__init__(bs, exact=True)
    def wants(m, x):
        if x.std()>2: raise ValueError('small values')
        return m.m(x)
    learn = learner(Mine(), n=32, bs=16, model=Odd(wants, m=small_model()), splitter=trainable_params)
    refused(learn, r'write learn.micro_batch\(4, exact=True, prove=False\)')
