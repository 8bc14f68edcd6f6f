//! Fetches the inputs of a call that it does not bring itself.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::OutputRef;
use pushpull_common::protocol::refusal::Detail;

use super::call_session::Admission;
use super::error::ServiceError;
use super::execution_waits::ExecutionWaits;
use super::runtime::client_core::ClientCore;
use super::service::Failure;
use super::value::Value;
use super::variables::ServerVariables;

/// Fetches variables of the parameter servers, and outputs that calls have left on other tasks.
#[derive(Debug)]
pub(crate) struct InputResolver {
    pub(crate) variables: Arc<ServerVariables>,
    pub(crate) client: ClientCore,
}

impl InputResolver {
    /// Pulls a variable for an input of a function, if it is admitted.
    pub(crate) async fn variable(
        &self,
        function: &str,
        input: &str,
        variable: &str,
        admission: &Admission,
        waits: &ExecutionWaits,
    ) -> Result<Value, Failure> {
        let pulled = self.variables.pull(variable, admission, waits).await;
        pulled.map_err(|error| match error {
            // Servers that cannot be reached may be back for another execution.
            super::variables::VariablePullError::Servers { detail, retry } => {
                Failure::Failed { retry, detail }
            }
            super::variables::VariablePullError::Unsuitable { detail } => {
                unsuitable(function, input, detail)
            }
            super::variables::VariablePullError::Refused(refusal) => Failure::Refused(refusal),
        })
    }

    /// Fetches an output from another task, if it is admitted.
    pub(crate) async fn fetch(
        &self,
        task: &TaskId,
        of: OutputRef,
        deadline: Option<Instant>,
        admission: Admission,
    ) -> Result<Value, Failure> {
        let final_failure = |detail| Failure::Failed { retry: false, detail };
        let link = self.client.link_of_task(task).map_err(final_failure)?;
        let fetched = self.client.fetch_admitted(link, of, deadline, Some(admission)).await;
        fetched.map_err(|error| match error {
            ServiceError::Refused { refusal, .. } => Failure::Refused(refusal),
            error => Failure::Failed { retry: true, detail: error.to_string() },
        })
    }
}

/// An input that does not suit a function.
pub(crate) fn unsuitable(function: &str, input: &str, detail: String) -> Failure {
    Failure::Refused(Refusal::Input {
        function: Detail::clipped(function),
        input: Detail::clipped(input),
        detail: Detail::clipped(detail),
    })
}
