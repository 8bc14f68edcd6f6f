//! The blocking form of the future value of a scheduled call.

use std::sync::Arc;

use crate::block_on::block_on_call;
use crate::execution_waits::ExecutionWaits;
use crate::{Outputs, ServiceError};

/// A [`crate::RemoteValue`] with blocking operations. A clone is the same value.
#[derive(Clone, Debug)]
pub struct RemoteValue {
    inner: crate::RemoteValue,
    /// The waits of the function in which the coordinator runs.
    waits: Option<Arc<ExecutionWaits>>,
}

impl RemoteValue {
    pub(super) fn new(
        inner: crate::RemoteValue,
        waits: Option<Arc<ExecutionWaits>>,
    ) -> RemoteValue {
        RemoteValue { inner, waits }
    }

    /// Returns the number of the call among those of its coordinator, from 1.
    pub fn number(&self) -> u64 {
        self.inner.number()
    }

    /// Blocking form of [`crate::RemoteValue::fetch`].
    ///
    /// # Errors
    /// The errors of [`crate::RemoteValue::fetch`].
    pub fn fetch(&self) -> Result<Outputs, ServiceError> {
        block_on_call(self.waits.as_deref(), self.inner.fetch())
    }

    /// Returns the outputs if the call has ended, like [`crate::RemoteValue::try_fetch`].
    pub fn try_fetch(&self) -> Option<Result<Outputs, ServiceError>> {
        self.inner.try_fetch()
    }
}
