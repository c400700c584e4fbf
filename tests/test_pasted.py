"A reader who copies the cells of a page in order gets what the page shows: a few pages, and with `SWEEP=1` all of them"
import pytest
from harness import SWEEP
from pasted import *

@pytest.mark.parametrize('name', pages if SWEEP else ['howto/callbacks','core'])
def test_cells_run_as_they_are_read(name, tmp_path):
    error = paste(cells(pages[name]), tmp_path)
    assert not error, error

def test_readers_have_what_they_see(tmp_path):
    "A name that the page hides is an error, and of this project only the package can be imported"
    assert not any(is_visible(f'{o}\nn = 4') for o in ('#| echo: false', '#| include: false', '#| export'))
    copied = [o for o in ('#| echo: true\na = 2', '#| hide\nn = 4', 'a*n') if is_visible(o)]
    assert "NameError: name 'n'" in paste(copied, tmp_path/'a')
    assert 'ModuleNotFoundError' in paste(['import harness'], tmp_path/'b')
    assert not paste(['import fastai_accum,os', 'assert os.listdir()==[]'], tmp_path/'c')

def test_no_page_hides_all_warnings():
    "A filter stays for the notebooks that the same process runs later"
    assert not [k for k,o in pages.items() if "filterwarnings('ignore')" in o.read_text(encoding='utf-8')]

def all_code(p): return [o for c in all_cells(p) if c['cell_type']=='code' and (o := ''.join(c['source']))]
on_colab = {p.relative_to(NBS).with_suffix('').as_posix():p for p in notebooks
            if '[ -e /content ] && pip install' in p.read_text(encoding='utf-8')}

def test_a_page_with_a_link_to_colab_reads_no_file_of_ours():
    "`.ci/docs.py` gives the link to pages that install the package, and there they are alone"
    assert len(on_colab)>15 and not {'index','compared'}&{*on_colab}
    assert not [k for k,p in on_colab.items() if re.search(r"""['"]\.\.|benchmarks'""", '\n'.join(all_code(p)))]

@pytest.mark.parametrize('name', on_colab if SWEEP else ['know/schedules'])
def test_a_page_with_a_link_to_colab_runs_alone(name, tmp_path):
    "With its hidden cells, in an empty folder"
    error = paste(all_code(on_colab[name]), tmp_path)
    assert not error, error
