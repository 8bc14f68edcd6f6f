//! [`PerWorker`]: a value of which each worker of a coordinator has one instance.

use super::dispatch::ResourceId;

/// A value of which each worker of a coordinator has one instance, such as its part of a data set:
/// see [`super::Coordinator::per_worker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerWorker {
    resource: ResourceId,
}

impl PerWorker {
    pub(crate) fn new(resource: ResourceId) -> PerWorker {
        PerWorker { resource }
    }

    pub(crate) fn resource(self) -> ResourceId {
        self.resource
    }
}
