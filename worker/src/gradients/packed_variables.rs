//! [`PackedVariables`]: some dense variables of a plan, one behind the other.

use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::variable::VariableSpec;

use super::gradient_buffer::AlignedBuffer;
use super::sharding_plan::ShardingPlan;

/// Some dense variables of a plan, and the place of each in a packed buffer that holds only these.
///
/// Invariant: both buffers have the variables in the same order, each padded to 8 bytes. So a range
/// of the plan's buffer that spans several of these variables is one range of the packed buffer.
#[derive(Clone, Debug)]
pub(crate) struct PackedVariables {
    variables: Vec<PackedVariable>,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct PackedVariable {
    id: VariableId,
    /// The range of the plan's buffer, without padding.
    range: Range<usize>,
    /// The start in the packed buffer.
    start: usize,
}

impl PackedVariables {
    /// Packs the dense variables for which `is_packed` holds.
    pub(crate) fn new(
        plan: &ShardingPlan,
        is_packed: impl Fn(&VariableSpec) -> bool,
    ) -> PackedVariables {
        let all = plan.catalogue().variables().iter().zip(0..).map(|(v, id)| (v, VariableId(id)));
        let dense = all.filter(|(variable, _)| !variable.is_sparse() && is_packed(variable));
        let mut variables: Vec<PackedVariable> =
            dense.map(|(_, id)| PackedVariable { id, range: plan.range(id), start: 0 }).collect();
        // A variable without elements may share its start with the next one.
        variables.sort_by_key(|variable| (variable.range.start, variable.range.end));
        let mut bytes = 0;
        for variable in &mut variables {
            variable.start = bytes;
            bytes += variable.range.len().next_multiple_of(8);
        }
        PackedVariables { variables, bytes }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// Returns the variables, in the order of the buffers.
    pub(crate) fn ids(&self) -> impl Iterator<Item = VariableId> + '_ {
        self.variables.iter().map(|variable| variable.id)
    }

    /// Returns a packed buffer of zeros.
    pub(crate) fn buffer(&self) -> AlignedBuffer {
        AlignedBuffer::of_bytes(self.bytes)
    }

    /// Copies the variables out of a buffer of the plan.
    pub(crate) fn pack(&self, values: &AlignedBuffer, packed: &mut AlignedBuffer) {
        for variable in &self.variables {
            let bytes = &values.bytes()[variable.range.clone()];
            packed.bytes_mut()[variable.packed()].copy_from_slice(bytes);
        }
    }

    /// Copies the variables into a buffer of the plan.
    pub(crate) fn unpack(&self, packed: &AlignedBuffer, values: &mut AlignedBuffer) {
        for variable in &self.variables {
            let bytes = &packed.bytes()[variable.packed()];
            values.bytes_mut()[variable.range.clone()].copy_from_slice(bytes);
        }
    }

    /// Returns the range of the packed buffer for a range of the plan's buffer, which must be of
    /// these variables and the padding behind them.
    pub(crate) fn locate(&self, range: &Range<usize>) -> Range<usize> {
        let behind = self.variables.partition_point(|it| it.range.start <= range.start);
        let variable = &self.variables[behind - 1];
        let start = variable.start + (range.start - variable.range.start);
        start..start + range.len()
    }
}

impl PackedVariable {
    fn packed(&self) -> Range<usize> {
        self.start..self.start + self.range.len()
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::partition::Partitioner;

    use super::*;
    use crate::gradients::sharding_plan::tests::plan;

    fn f32(name: &str, elements: u64) -> VariableSpec {
        VariableSpec::f32(name, [elements]).unwrap()
    }

    #[test]
    fn packed_variables_keep_their_order_and_padding() {
        let split = Partitioner::Fixed { shards: 2 };
        let variables = vec![
            f32("a", 3).partitioner(split),
            f32("w", 4),
            f32("b", 1).local(),
            f32("none", 0).local(),
            f32("c", 5).local(),
        ];
        let plan = plan(variables, 1, 1);
        let packed = PackedVariables::new(&plan, |variable| variable.name() != "w");
        let mut values = AlignedBuffer::of_bytes(plan.bytes());
        for (id, byte) in [(0, 1), (1, 9), (2, 2), (4, 4)] {
            values.bytes_mut()[plan.range(VariableId(id))].fill(byte);
        }
        let mut buffer = packed.buffer();
        packed.pack(&values, &mut buffer);
        // The unpartitioned ones come first. `b` and `a` end in padding.
        let expected = [[2; 4], [0; 4], [4; 4], [4; 4], [4; 4], [4; 4], [4; 4], [0; 4]].concat();
        assert_eq!(buffer.bytes()[..32], expected);
        assert_eq!(buffer.bytes()[32..], [[1; 12].as_slice(), &[0; 4]].concat());
        let b = plan.range(VariableId(2));
        let c = plan.range(VariableId(4));
        assert_eq!(packed.locate(&(b.start..c.end)), 0..28);
        assert_eq!(packed.locate(&(c.start + 8..c.start + 12)), 16..20);
        let mut restored = AlignedBuffer::of_bytes(plan.bytes());
        packed.unpack(&buffer, &mut restored);
        for (id, same) in [(0, true), (1, false), (2, true), (4, true)] {
            let range = plan.range(VariableId(id));
            assert_eq!(restored.bytes()[range.clone()] == values.bytes()[range], same, "{id}");
        }
    }
}
