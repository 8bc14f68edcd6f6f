//! The first values that the chief sets instead of the initializers of the variables.

use std::collections::BTreeMap;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;

use crate::error::ViewError;
use crate::gradients::sharding_plan::ShardingPlan;

/// The first values of variables, set by the closure that the chief passes to
/// [`crate::Worker::join`].
///
/// The servers initialize the other variables with their initializers.
#[derive(Debug)]
pub struct InitialValues<'a> {
    plan: &'a ShardingPlan,
    values: BTreeMap<VariableId, Bytes>,
    fault: Option<ViewError>,
}

impl<'a> InitialValues<'a> {
    pub(crate) fn new(plan: &'a ShardingPlan) -> InitialValues<'a> {
        InitialValues { plan, values: BTreeMap::new(), fault: None }
    }

    /// Sets the first values of a dense variable, in row-major order. A later call replaces an
    /// earlier one. Wrong names, types and lengths are errors of `join`: [`crate::Error::View`].
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> &mut Self {
        match padded_bytes(self.plan, name, values) {
            Ok((id, bytes)) => {
                self.values.insert(id, bytes);
            }
            Err(fault) => {
                self.fault.get_or_insert(fault);
            }
        }
        self
    }

    /// Returns the values, or the first error.
    pub(crate) fn finish(self) -> Result<BTreeMap<VariableId, Bytes>, ViewError> {
        match self.fault {
            None => Ok(self.values),
            Some(fault) => Err(fault),
        }
    }
}

/// Returns the id of a variable, if `values` are all its elements.
pub(crate) fn check_whole<T: Element>(
    plan: &ShardingPlan,
    name: &str,
    values: &[T],
) -> Result<VariableId, ViewError> {
    let (id, range) = plan.locate::<T>(name)?;
    if size_of_val(values) != range.len() {
        let shape = plan.catalogue().variable(id).shape().to_string();
        let (name, elements) = (name.to_owned(), values.len());
        return Err(ViewError::Length { name, elements, shape });
    }
    Ok(id)
}

/// Returns the id of a variable and its elements as bytes, with the padding that is sent behind
/// them.
pub(crate) fn padded_bytes<T: Element>(
    plan: &ShardingPlan,
    name: &str,
    values: &[T],
) -> Result<(VariableId, Bytes), ViewError> {
    let id = check_whole(plan, name, values)?;
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let mut copy = Vec::with_capacity(bytes.len().next_multiple_of(8));
    copy.extend_from_slice(bytes);
    copy.resize(bytes.len().next_multiple_of(8), 0);
    Ok((id, copy.into()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    fn plan() -> ShardingPlan {
        let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap()).to_vec();
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn values_are_padded_and_later_ones_replace_earlier_ones() {
        let plan = plan();
        let mut initial_values = InitialValues::new(&plan);
        initial_values.set("b", &[9.0_f32; 3]).set("b", &[1.0_f32, 2.0, 3.0]);
        let values = initial_values.finish().unwrap();
        let expected: Vec<u8> =
            [1.0_f32, 2.0, 3.0, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(values.len(), 1);
        assert_eq!(values[&VariableId(1)], expected);
    }

    #[test]
    fn the_first_error_is_returned() {
        let plan = plan();
        let mut initial_values = InitialValues::new(&plan);
        initial_values.set("a", &[1.0_f32; 3]).set("a", &[1.0_f32; 4]).set("x", &[1.0_f32]);
        let (name, shape) = ("a".to_owned(), plan.catalogue().variable(VariableId(0)).shape());
        let shape = shape.to_string();
        assert_eq!(
            initial_values.finish().unwrap_err(),
            ViewError::Length { name, elements: 4, shape }
        );
    }
}
