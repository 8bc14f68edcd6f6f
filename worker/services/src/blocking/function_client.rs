//! The blocking form of the client.

use std::sync::Arc;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TaskId;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::InitialValues;

use crate::block_on::block_on;
use crate::call::Call;
use crate::description::Description;
use crate::error::ServiceError;
use crate::function_client_config::FunctionClientConfig;
use crate::kept::Kept;
use crate::outputs::Outputs;
use crate::value::Value;

/// A [`crate::FunctionClient`] with blocking operations.
#[derive(Debug)]
pub struct FunctionClient {
    inner: Arc<crate::FunctionClient>,
}

impl FunctionClient {
    /// Blocking form of [`crate::FunctionClient::connect`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::connect`].
    pub fn connect(
        config: impl Into<FunctionClientConfig>,
    ) -> Result<FunctionClient, ServiceError> {
        Ok(FunctionClient { inner: Arc::new(block_on(crate::FunctionClient::connect(config))?) })
    }

    /// Returns the client of a function.
    pub(crate) fn of_function(inner: crate::FunctionClient) -> FunctionClient {
        FunctionClient { inner: Arc::new(inner) }
    }

    /// Returns the client with futures, for a coordinator.
    pub(super) fn shared(&self) -> Arc<crate::FunctionClient> {
        self.inner.clone()
    }

    /// Returns the task of the target, like [`crate::FunctionClient::target`].
    pub fn target(&self) -> &TaskId {
        self.inner.target()
    }

    /// Returns the cluster as the target knows it, like [`crate::FunctionClient::cluster`].
    pub fn cluster(&self) -> ClusterSpec {
        self.inner.cluster()
    }

    /// Blocking form of [`crate::FunctionClient::declare`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::declare`].
    pub fn declare(
        &self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<(), ServiceError> {
        self.inner.wait(|| self.inner.declare(variables, fill))
    }

    /// Blocking form of [`crate::FunctionClient::describe`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::describe`].
    pub fn describe(&self, task: &TaskId) -> Result<Description, ServiceError> {
        self.inner.wait(|| self.inner.describe(task))
    }

    /// Blocking form of [`crate::FunctionClient::call`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::call`].
    pub fn call(&self, call: Call) -> Result<Outputs, ServiceError> {
        self.inner.wait(|| self.inner.call(call))
    }

    /// Blocking form of [`crate::FunctionClient::run`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::run`].
    pub fn run<const N: usize>(&self, calls: [Call; N]) -> Result<[Outputs; N], ServiceError> {
        self.inner.wait(|| self.inner.run(calls))
    }

    /// Blocking form of [`crate::FunctionClient::run_all`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::run_all`].
    pub fn run_all(
        &self,
        calls: impl IntoIterator<Item = Call>,
    ) -> Result<Vec<Outputs>, ServiceError> {
        self.inner.wait(|| self.inner.run_all(calls))
    }

    /// Calls a function whose outputs stay on its server, and waits for its end. This is the
    /// blocking form of [`crate::FunctionClient::keep`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::keep`].
    pub fn keep(&self, call: Call) -> Result<Kept, ServiceError> {
        self.inner.wait(|| async { Ok(self.inner.keep(call)?.await?.0) })
    }

    /// Blocking form of [`crate::FunctionClient::fetch`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionClient::fetch`].
    pub fn fetch(&self, kept: &Kept, output: &str) -> Result<Value, ServiceError> {
        self.inner.wait(|| self.inner.fetch(kept, output))
    }

    /// The client with futures in place of blocking operations.
    pub fn inner(&self) -> &crate::FunctionClient {
        &self.inner
    }
}
