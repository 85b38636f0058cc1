"""Running training steps on onnxruntime.

What a step is:

- `Step`: a training_info entry as a flat graph.
- `Template`: a step whose updates are packed, for batches of any shape.
- `Part`: a template with its graphs for batches of different shapes, whole or cut in two.
- `Variant`: a lowered graph for certain shapes, in an open session.
- `Binding`: a variant bound to the memory of the variables; it computes gradients and updates.
- `Execution`: holds the variables, and runs the parts of a step one after the other.

How variables are updated:

- `Group`: variables that one elementwise formula updates; `Packed`: their memory, in one piece.
- Where an update runs: as nodes of the gradient graph, which saves a run in small models, or in the
  backward pass, which saves the memory of gradients; as nodes of a graph of its own, if variables
  are on a device; or else as an `Update`, chunk by chunk in the cache of a core.
- `Update`: applies a packed formula, in a session (`SessionUpdate`), which runs everywhere and
  with Python kernels, or as LLVM code (`CompiledUpdate`), which takes half the time.
- `Translation`: a formula as LLVM's intermediate code; `Call`: machine code with its arguments.

What they share:

- `Variables`: the memory of all variables, and which of their two buffers hold present values.
- `Sessions`: opens onnxruntime's sessions; `Settings`: how; `SessionReport`: what was chosen.
- `Device`, `DeviceArray`: memory of an execution provider; `PlacedNode`: where a node runs.
- `Cut`: the graphs of a step in two halves; `Layout`, `Differentiated`: what the first one returns.
- `Repetition`: several steps in one run; `StringFront`: what runs before a step that reads strings.
"""
