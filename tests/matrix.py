"""The rows of the page "What is exact and what is not". A test marked as a row measures it, and the page shows that.

    @row('Callbacks', 'GradientClip', note='sees finished gradients')
    def test_gradient_clip(works): works(*pair(GradientClip))

or, in a test of many rows, `test_rows = alike(case('Callbacks', 'GradientClip', cbs=GradientClip), …)`.
`make works` runs them all and writes `works_with.json`, which the page reads."""
import harness,importlib,json,pytest,re
from harness import *

def row(group, name, compared='everything', tol=TOL, note=''):
    """Mark a test as evidence for a row: `compared` with the large batch up to `tol`; several tests, or cases of
    one, can share it"""
    return pytest.mark.row(group=group, name=name, compared=compared, tol=tol, note=note)

def figure(err): return 'none' if err==0 else f'{err:.0e}' if err<.01 else f'{err:.2g}'   # as the page prints it
def key(row): return row['group'],row['name']
def committed():
    "The rows that the page shows"
    p = Path(__file__).parent/'works_with.json'
    return {key(r):r for r in json.loads(p.read_text(encoding='utf-8'))['rows']} if p.exists() else {}

def all_rows():
    "The rows that tests are marked with, or single cases of tests; each row once"
    modules = [importlib.import_module(p.stem) for p in sorted(Path(__file__).parent.glob('test_with_*.py'))]
    tests = [f for m in modules for k,f in vars(m).items() if k.startswith('test')]
    marks = [m for f in tests for m in getattr(f, 'pytestmark', [])]
    marks += [m for o in marks if o.name=='parametrize' for case in o.args[1] for m in getattr(case, 'marks', ())]
    rows = [m.kwargs for m in marks if m.name=='row']
    return [r for i,r in enumerate(rows) if r not in rows[:i]]

class Works:
    "What a test has measured for its row: the largest error, or what is raised"
    def __init__(self, row, results, writing): store_attr()
    def _result(self): return self.results.setdefault(key(self.row), dict(self.row, error=None, raises=None))
    def __call__(self, a, b, but=()):
        "Compare everything that two learners have recorded"
        assert len(b.spy.steps)>0, 'the large batch made no step, so nothing was compared'
        self.error(*worst(a, b, but))
    def error(self, err, where=''):
        "Take a relative error that was measured elsewhere"
        assert err<=self.row['tol'], f'relative error {err:.2e} at {where}, allowed {self.row["tol"]:.0e}'
        res = self._result()
        res['error'] = max(err, res['error'] or 0)
    def same(self, a, b, where=''):
        "Compare two values, however nested"
        self.error(*rel(a, b, where))
    def differs(self, a, b, least):
        "Take the difference of two things that are known to differ. If it is below `least`, the row is out of date"
        err = rel(a, b)[0]
        assert least<=err<math.inf, f'relative error {err:.2e}, expected {least:.0e} or more'
        self.error(err)
    @contextmanager
    def refused(self, exc, match):
        "What a user sees where something does not work"
        with pytest.raises(exc, match=match) as e: yield
        # one sentence, since PyTorch goes on for a page, without what fastai puts before an error of a callback
        text = ' '.join(f'{e.type.__name__}: {e.value}'.split('. ')[0].split())
        text = re.sub(r'Exception occured in `\w+` when calling event `\w+`: ', '', text)
        self._result()['raises'] = text
        page = committed().get(key(self.row))
        if page and not self.writing:
            assert text==page['raises'], 'the page shows another error: run `make works`'

def once(learn): learn.fit_one_cycle(2, 0.02)

def pair(cbs=None, own=lambda: AccumulateStep(4), bs=8, n=76, fit=once, dls=make_dls, model=small_model,
         drop_last=False, matters=False, **kwargs):
    """`fit` in micro-batches of `bs` with `own` callbacks and with the large batch, on what `dls`, `model` and `cbs`
    make for each; `matters`: without `cbs` it has to be another training"""
    def load(bs): return dls(n, bs, drop_last=drop_last)
    def make(): torch.manual_seed(0); return model()
    train = partial(harness.pair, own, bs, fit=fit, dls=load, model=make, **kwargs)
    a,b = train(also=cbs)
    assert not matters or worst(train()[1], b)[0]>1e-6, 'the callback changes nothing, so any comparison would do'
    return a,b

tails = dict(drop_last=False),dict(drop_last=True)

def given(cb, *kws): return [dict(cbs=partial(cb, **kw)) for kw in kws]

def case(group, name, *trainings, compared='everything', tol=TOL, note='', check=None, **kwargs):
    """A row of `alike`, for which `pair` trains with `kwargs` and each of `trainings`. What a fit or a callback has put
    into `learn.got` is compared too, and `check(a, b)` must be true"""
    return pytest.param([{**kwargs, **o} for o in trainings or [{}]], check, id=re.sub(r'\W+', '_', name),
                        marks=row(group, name, compared, tol, note))

def alike(*cases):
    "A test of rows that compare everything"
    @pytest.mark.parametrize('trainings,check', cases)
    def test(trainings, check, works, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)   # where callbacks write files
        def train(kw):
            a,b = pair(**kw)
            works(a, b)
            works.same(*(vars(o).get('got', ()) for o in (a,b)), 'got')
            assert not check or check(a, b)
        each(kw=trainings)(train)()
    return test

__all__ = [o for o in globals() if not o.startswith(('_','test'))]
