"""The rows of the page "Works with". A test marked as a row measures it, and what it measured is what the page shows.

    @row('Callbacks', 'GradientClip', note='sees finished gradients')
    def test_gradient_clip(works): works(*pair(GradientClip))

or, in a test of many rows, `test_rows = alike(case('Callbacks', 'GradientClip', cbs=GradientClip), …)`.
`make works` runs them all and writes `works_with.json`, which the page reads."""
import importlib,json,pytest,re
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

def rows_of(module):
    "The rows that tests of `module` are marked with, or single cases of tests; each row once"
    marks = [m for k,f in vars(module).items() if k.startswith('test') for m in getattr(f, 'pytestmark', [])]
    marks += [m for o in marks if o.name=='parametrize' for case in o.args[1] for m in getattr(case, 'marks', ())]
    rows = [m.kwargs for m in marks if m.name=='row']
    return [r for i,r in enumerate(rows) if r not in rows[:i]]

def all_rows():
    "The rows of all tests, each once"
    here = Path(__file__).resolve().parent
    modules = [importlib.import_module(p.stem) for p in sorted(here.glob('test_with_*.py'))]
    return [r for m in modules for r in rows_of(m)]

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
        if page and 'AccumulateStep:' in text and not self.writing:
            assert text==page['raises'], 'the page shows another error: run `make works`'
    def fails_anyway(self, exc, match, train):
        "`train(cbs)` fails in the same way with plain fastai"
        for cbs in [],[AccumulateStep(4)]:
            with self.refused(exc, match): train(cbs)

def once(learn): learn.fit_one_cycle(2, 0.02)

def pair(cbs=None, n=76, bs=8, n_step=4, fit=once, dls=make_dls, model=None, drop_last=False, matters=False, **kwargs):
    """`fit` in micro-batches and with the large batch, on what `dls`, `model` and `cbs` make for each; `matters`:
    without `cbs` it has to be another training"""
    def train(bs, acc):
        learn = make_learner(dls(n, bs, drop_last=drop_last), model=model and model(),
                             cbs=acc + (L(cbs()) if cbs else []), **kwargs)
        fit(learn)
        return learn
    a,b = train(bs, [AccumulateStep(n_step)]),train(bs*n_step, [])
    if matters:
        cbs = None
        assert worst(train(bs*n_step, []), b)[0]>1e-6, 'the callback changes nothing, so any comparison would do'
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
