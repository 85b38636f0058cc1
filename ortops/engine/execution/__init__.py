"""Running training steps on onnxruntime.

What a step is:

- `Step`: a training_info entry as a flat graph.
- `Template`: a step with packed updates, whose graph can be lowered for batches of any shape.
- `Part`: a template with its graphs for batches of different shapes.
- `SplitStep`: a part cut in two after its gradients; `Cut`: the graphs of the two halves.
- `Variant`: a graph that was lowered for certain shapes, in an open session.
- `Binding`: a variant bound to memory, which computes gradients and then applies the updates.
- `Execution`: holds the variables, and runs the parts of a step one after the other.

How variables are updated:

- `Group`: variables that one elementwise formula updates; `Role`: tensors that are alike in it.
- `Packed`: the memory of a group, in one piece for each role.
- `Update`: applies the formula of a group after the gradients, chunk by chunk in the cache of a
  core; `BoundUpdate`: the same, bound to memory.
- `SessionUpdate`: an update in a session, which runs everywhere and with Python kernels.
- `CompiledUpdate`: an update in LLVM code, which takes half the time; `Translation`: its formula as
  intermediate code; `Call`: its machine code with its arguments.
- `Trial`: times both on a chunk, so that the faster is kept.

Other updates are nodes of a graph (`ortops.engine.execution.updates_in_graph`): of the gradient
graph in small models, which saves a run, and in the backward pass, which saves the memory of
gradients; or of a graph of its own, if variables are on a device.

What they share:

- `Variable`: the memory of a variable; `Variables`: all of them, and which memory is present;
  `Values`: what they begin with, in memory or in a file.
- `Device`: what has memory of its own; `DeviceArray`: a tensor there.
- `Sessions`: opens onnxruntime's sessions; `Settings`: how, and all else that is chosen.
- `SessionReport`: what was chosen; `PackedUpdate`: the same for a group.
- `PlacedNode`: a node, and the provider that runs it.
- `Layout`: the memory of gradients that a caller reads; `Differentiated`: the results there.
- `Front`: what runs before a step on a batch, as where strings are read; `Fronts`: all of them.
- `Lookup`: the front that reads rows of tables which stay in their file.
"""
