//! The declaration of the data set that a training consumes, on the step owner's shard.

use pushpull_common::data_set::{DataSet, UNSPENT_BATCHES_MAX};
use pushpull_common::protocol::message::DeclareData;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Refusal, message};

use crate::aggregate::data_position::DataPosition;
use crate::client_key::ClientKey;
use crate::shard::Shard;
use crate::shard::request::PeerRequest;

/// A client's declaration of the data set that it reads.
pub(super) struct DataDeclaration {
    pub(super) request: PeerRequest,
    pub(super) client: ClientKey,
    pub(super) declared: DeclareData,
}

impl Shard {
    /// Declares the data set, or compares it with the declared one.
    pub(super) fn declare_data(&mut self, declaration: &DataDeclaration) {
        let request = &declaration.request;
        match self.try_declare_data(declaration) {
            Ok(answer) => {
                self.peers.registry.client_mut(declaration.client).reads_data = true;
                request.answer(&mut self.out, answer.into());
            }
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }

    fn try_declare_data(
        &mut self,
        declaration: &DataDeclaration,
    ) -> Result<message::DataDeclared, Refusal> {
        let &DataDeclaration { request, client, ref declared } = declaration;
        let now = request.since;
        let clients = &self.peers.registry;
        let planted = self.config.planted;
        let differs = |text: String| Refusal::DataSet { differs: Detail::clipped(text) };
        let unsupported = |text: String| Refusal::Unsupported {
            kind: request.kind,
            detail: Detail::clipped(text),
        };
        let Some(owner) = &mut self.steps.owner else {
            return Err(unsupported(format!("{} does not own the step", self.id)));
        };
        if !self.variables.is_ready() {
            return Err(Refusal::NotInitialized {});
        }
        let set = DataSet::try_from(declared).map_err(|error| unsupported(error.to_string()))?;
        let ranks = owner.coordinator().and_then(|coordinator| coordinator.ordered_ranks());
        if let Some(ranks) = ranks.filter(|&ranks| 2 * ranks as usize > UNSPENT_BATCHES_MAX) {
            let most = UNSPENT_BATCHES_MAX / 2;
            return Err(unsupported(format!(
                "a data set is for {most} deterministic replicas at most, not {ranks}"
            )));
        }
        let reader = clients.reads_data(client, now);
        match &owner.ledger().data {
            // Those who have declared the shorter one would be refused when they join again.
            Some(data) if set.extends(data.set()) && reader.is_none() => owner.extend_data(set),
            Some(data) => {
                if let Some(difference) = data.set().difference(&set) {
                    return Err(differs(format!("of the declared data set {difference}")));
                }
            }
            None if owner.ledger().len() > 0 => {
                let tokens = owner.ledger().len();
                return Err(differs(format!(
                    "{tokens} tokens without a batch are held by workers that read no data set"
                )));
            }
            None => {
                // Otherwise one late or misconfigured worker could end the training of all others.
                if let Some(other) = clients.trains_without_data(client, now) {
                    return Err(differs(format!("{} trains without a data set", other.task)));
                }
                owner.set_data(Some(DataPosition::new(set, planted)));
            }
        }
        let data = owner.ledger().data.as_ref();
        Ok(message::DataDeclared {
            begun: data.map_or(0, |data| data.next().0),
            unspent: data.map_or(0, |data| data.unspent() as u64),
        })
    }

    /// Returns the refusal of a client that does not read the data set that others have declared.
    pub(super) fn check_reader(&self, client: ClientKey) -> Result<(), Refusal> {
        let data = self.steps.owner.as_ref().and_then(|owner| owner.ledger().data.as_ref());
        match data.filter(|_| !self.peers.registry.client(client).reads_data) {
            None => Ok(()),
            Some(data) => {
                let name = data.set().name();
                let text = format!("this worker has not declared the data set {name:?}");
                Err(Refusal::DataSet { differs: Detail::clipped(text) })
            }
        }
    }
}
