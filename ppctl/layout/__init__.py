"""The layout language: `Et*3|(tt|)*29,m|L` and what it means.

`layer_layout` is the public class, `reader` reads both written forms, `rules` judges and finds the nearest sound
layout, `letters` holds letters, carets and the canonical string.
"""

from ppctl.layout.layer_layout import PipelineParallelLayerLayout, even_layout
from ppctl.layout.letters import LayerType

__all__ = ["LayerType", "PipelineParallelLayerLayout", "even_layout"]
