//! First values that the chief gives, in place of those its variables' specifications say.

use std::collections::BTreeMap;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;

use crate::error::ViewError;
use crate::fanout::Plan;
use crate::params::locate;

/// First values, filled by the closure that the chief hands to [`crate::Worker::join`].
///
/// Variables that are not given values here take those of their initializer, which the servers
/// compute.
#[derive(Debug)]
pub struct Initial<'a> {
    plan: &'a Plan,
    values: BTreeMap<VariableId, Bytes>,
    fault: Option<ViewError>,
}

impl<'a> Initial<'a> {
    pub(crate) fn new(plan: &'a Plan) -> Initial<'a> {
        Initial { plan, values: BTreeMap::new(), fault: None }
    }

    /// Gives a variable its first values, in row-major order. What is wrong with them is told by
    /// `join`.
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> &mut Self {
        match padded(self.plan, name, values) {
            Ok((id, bytes)) => {
                self.values.insert(id, bytes);
            }
            Err(fault) => {
                self.fault.get_or_insert(fault);
            }
        }
        self
    }

    /// The values given, or the first fault among them.
    pub(crate) fn finish(self) -> Result<BTreeMap<VariableId, Bytes>, ViewError> {
        match self.fault {
            None => Ok(self.values),
            Some(fault) => Err(fault),
        }
    }
}

/// Elements for a whole variable as bytes, with the padding that travels behind them.
pub(crate) fn padded<T: Element>(
    plan: &Plan,
    name: &str,
    values: &[T],
) -> Result<(VariableId, Bytes), ViewError> {
    let (id, range) = locate::<T>(plan, name)?;
    let bytes: &[u8] = bytemuck::cast_slice(values);
    if bytes.len() != range.len() {
        let shape = plan.catalogue().variable(id).shape().to_string();
        let (name, elements) = (name.to_owned(), values.len());
        return Err(ViewError::Length { name, elements, shape });
    }
    let mut copy = Vec::with_capacity(bytes.len().next_multiple_of(8));
    copy.extend_from_slice(bytes);
    copy.resize(bytes.len().next_multiple_of(8), 0);
    Ok((id, copy.into()))
}
