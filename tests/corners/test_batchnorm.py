"The note on batch norm"
import pytest
from harness import *
import fastai_accum.all   # for `exact=True`
from fastai_accum.extras.batchnorm import *
from fastai_accum.microbatch import *
from fastai_accum.patch import accumulation

# ---- the note

@pytest.fixture
def notes(capsys):
    "The notes on batch norm that a new learner prints in `n` fits"
    def f(cbs=None, model=None, n=1):
        m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double() if model is None else model()
        learn = make_learner(make_dls(24, 4), m, cbs=cbs and cbs(), splitter=params)
        for _ in range(n): learn.fit(1)
        return [o for o in capsys.readouterr().out.splitlines() if 'batch norm sees' in o]
    return f

def test_the_note_comes_once_a_learner(notes):
    for cbs in (lambda: AccumulateStep(2)),(lambda: MicroBatch(2)),(lambda: MicroBatch(2, coupled=True)):
        assert len(notes(cbs, n=3))==1

class Marks(Callback):
    "Prints where the progress bar would begin"
    order = ProgressCallback.order
    def before_fit(self): print('the bar begins')

class MyMicro(MicroBatch): pass

@pytest.mark.parametrize('cbs,sees,line', [
    (lambda: MyMicro(2), 'MyMicro: batch norm sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: MicroBatch(2), 'MicroBatch: batch norm sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: MicroBatch(2, coupled=True), 'sees 2 samples', 'learn.micro_batch(2, exact=True)'),
    (lambda: AccumulateStep(3), 'AccumulateStep: batch norm sees 4 samples',
     'load batches of 12 and write\nlearn.remove_cb(AccumulateStep).micro_batch(4, exact=True)'),
    (lambda: AccumulateStep(n_samples=8), 'sees 4 samples', 'load batches of 8 '),
    (lambda: [AccumulateStep(3),MicroBatch(2)], 'sees 2 samples', 'load batches of 12 '),
    (lambda: [AccumulateStep(3),MicroBatch(2, exact=True)], 'sees 4 samples',
     'load batches of 12 and write\nlearn.remove_cb(AccumulateStep).micro_batch(2, exact=True)')])
def test_the_note_names_the_line_above_the_bar(cbs, sees, line, capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    make_learner(make_dls(24, 4), model, cbs=[*L(cbs()), Marks()], splitter=params).fit(1)
    said,_ = capsys.readouterr().out.split('the bar begins')
    assert sees in said and line in said, said

def test_the_note_names_what_turns_accumulation_off(capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    with accumulation(3): make_learner(make_dls(24, 4), model, splitter=params).fit(1)
    assert 'write\nturn_off_accumulation(); learn.micro_batch(4, exact=True)' in capsys.readouterr().out

def test_the_note_comes_when_a_batch_is_cut(capsys):
    "`MicroBatch()` cuts nothing until memory runs out, and large slices cut nothing"
    class Small(nn.Sequential):
        def forward(self, x):
            if len(x)>limit: raise RuntimeError('out of memory')
            return super().forward(x)
    for limit,cb in (9,MicroBatch()),(9,MicroBatch(4)),(3,MicroBatch()):
        model = Small(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
        make_learner(make_dls(24, 4), model, cbs=cb, splitter=params).fit(1)
        out = capsys.readouterr().out
        assert ('batch norm sees 2 samples' in out and 'learn.micro_batch(exact=True)' in out)==(limit==3), out

def test_no_note_before_an_error(capsys):
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)).double()
    learn = make_learner(make_dls(24, 4), model, cbs=AccumulateStep(50, drop_last=True), splitter=params)
    with pytest.raises(ValueError, match='would never step'): learn.fit(1)
    assert 'batch norm' not in capsys.readouterr().out

def test_the_note_does_not_come(notes):
    for cbs in (None, lambda: AccumulateStep(1), lambda: [AccumulateStep(2),BatchNormEval()]): assert not notes(cbs)
    assert not notes(lambda: AccumulateStep(2), small_model)

def test_the_note_does_not_come_with_exact(notes): assert not notes(lambda: MicroBatch(2, exact=True))
