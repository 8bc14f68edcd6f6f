//! The blocking form of the coordinator.

use crate::blocking::{FunctionClient, RemoteValue};
use crate::{Call, CoordinatorConfig, PerWorker, ServiceError};

/// A [`crate::Coordinator`] with blocking operations.
#[derive(Debug)]
#[doc(alias = "ClusterCoordinator")]
pub struct Coordinator {
    inner: crate::Coordinator,
    client: FunctionClient,
}

impl Coordinator {
    /// Starts a coordinator without a name, like [`crate::Coordinator::start`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::start`].
    pub fn start(
        client: FunctionClient,
        config: CoordinatorConfig,
    ) -> Result<Coordinator, ServiceError> {
        let inner = crate::Coordinator::start(client.shared(), config)?;
        Ok(Coordinator { inner, client })
    }

    /// Blocking form of [`crate::Coordinator::resume`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::resume`].
    pub fn resume(
        client: FunctionClient,
        name: &str,
        config: CoordinatorConfig,
    ) -> Result<Coordinator, ServiceError> {
        let resumed = crate::Coordinator::resume(client.shared(), name, config);
        let inner = client.inner().block_on(resumed)?;
        Ok(Coordinator { inner, client })
    }

    /// Returns the client by which the coordinator calls.
    pub fn client(&self) -> &FunctionClient {
        &self.client
    }

    /// Blocking form of [`crate::Coordinator::schedule`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::schedule`].
    pub fn schedule(&self, call: Call) -> Result<RemoteValue, ServiceError> {
        let client = self.client.inner();
        let value = client.block_on(self.inner.schedule(call))?;
        Ok(RemoteValue::new(value, client.core().waits().cloned()))
    }

    /// Makes a per-worker value, like [`crate::Coordinator::per_worker`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::per_worker`].
    #[doc(alias = "create_per_worker_dataset")]
    pub fn per_worker(&self, call: Call) -> Result<PerWorker, ServiceError> {
        self.inner.per_worker(call)
    }

    /// Blocking form of [`crate::Coordinator::join`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::join`].
    pub fn join(&self) -> Result<(), ServiceError> {
        self.client.inner().block_on(self.inner.join())
    }

    /// Whether every scheduled call has ended, like [`crate::Coordinator::done`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::done`].
    pub fn done(&self) -> Result<bool, ServiceError> {
        self.inner.done()
    }

    /// Returns the number up to which all calls have ended, like [`crate::Coordinator::settled`].
    pub fn settled(&self) -> u64 {
        self.inner.settled()
    }

    /// Gives the next call this number, like [`crate::Coordinator::skip_to`].
    pub fn skip_to(&self, number: u64) {
        self.inner.skip_to(number);
    }

    /// Blocking form of [`crate::Coordinator::close`].
    ///
    /// # Errors
    /// The errors of [`crate::Coordinator::close`].
    pub fn close(self) -> Result<(), ServiceError> {
        self.client.inner().block_on(self.inner.close())
    }
}
