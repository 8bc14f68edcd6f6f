//! The declaration of the data set that a training consumes, on the step owner's shard.

use std::time::Instant;

use pushpull_common::data_set::DataSet;
use pushpull_common::protocol::message::{DeclareData, SkipBatch};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Refusal, message};

use super::intake::Intake;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::client_registry::ClientRegistry;
use super::peers::peer_request::PeerRequest;
use super::steps::Steps;
use super::variables::Variables;
use crate::aggregate::data_position::{DataPosition, UNSPENT_BATCHES_MAX};
use crate::client_key::ClientKey;

/// A client's declaration of the data set that it reads.
pub(super) struct DataDeclaration {
    pub(super) request: PeerRequest,
    pub(super) client: ClientKey,
    pub(super) declared: DeclareData,
}

impl DataDeclaration {
    /// Declares the data set, or compares it with the declared one.
    pub(super) fn answer(
        self,
        steps: &mut Steps,
        variables: &Variables,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        match self.declare(steps, variables, &peers.registry, now) {
            Ok(answer) => {
                peers.registry.client_mut(self.client).reads_data = true;
                self.request.answer(out, answer.into());
            }
            Err(refusal) => self.request.refuse(out, refusal),
        }
    }

    fn declare(
        &self,
        steps: &mut Steps,
        variables: &Variables,
        clients: &ClientRegistry,
        now: Instant,
    ) -> Result<message::DataDeclared, Refusal> {
        let differs = |text: String| Refusal::DataSet { differs: Detail::clipped(text) };
        let unsupported = |text: String| Refusal::Unsupported {
            kind: self.request.kind,
            detail: Detail::clipped(text),
        };
        let (id, planted) = (steps.id, steps.config.planted);
        let Some(owner) = &mut steps.owner else {
            return Err(unsupported(format!("{id} does not own the step")));
        };
        if !variables.is_ready() {
            return Err(Refusal::NotInitialized {});
        }
        let set =
            DataSet::try_from(&self.declared).map_err(|error| unsupported(error.to_string()))?;
        let ranks = owner.coordinator().and_then(|coordinator| coordinator.ordered_ranks());
        if let Some(ranks) = ranks.filter(|&ranks| 2 * ranks as usize > UNSPENT_BATCHES_MAX) {
            let most = UNSPENT_BATCHES_MAX / 2;
            return Err(unsupported(format!(
                "a data set is for {most} deterministic replicas at most, not {ranks}"
            )));
        }
        let reader = clients.reads_data(self.client, now);
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
                if let Some(other) = clients.trains_without_data(self.client, now) {
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
}

impl Steps {
    /// Returns the refusal of a client that does not read the data set that others have declared.
    pub(super) fn check_reader(&self, peers: &Peers, client: ClientKey) -> Result<(), Refusal> {
        let data = self.owner.as_ref().and_then(|owner| owner.ledger().data.as_ref());
        match data.filter(|_| !peers.registry.client(client).reads_data) {
            None => Ok(()),
            Some(data) => {
                let name = data.set().name();
                let text = format!("this worker has not declared the data set {name:?}");
                Err(Refusal::DataSet { differs: Detail::clipped(text) })
            }
        }
    }

    /// Sets the gauges of the data position.
    pub(super) fn count_batches(&self) {
        let data = self.owner.as_ref().and_then(|owner| owner.ledger().data.as_ref());
        self.counters.batches_begun.set(data.map_or(0, |data| data.next().0));
        self.counters.batches_unspent.set(data.map_or(0, |data| data.unspent() as u64));
    }

    /// Spends the batch of an unspent token without a gradient, and ends the token.
    pub(super) fn skip_batch(
        &mut self,
        intake: &Intake,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        client: ClientKey,
        skipped: &SkipBatch,
    ) {
        let (token, generation) = (skipped.token, skipped.generation);
        let kept = !self.is_synchronous() && intake.is_whole(token);
        let owner = self.owner.as_mut().filter(|_| !kept);
        if owner.is_some_and(|owner| owner.skip(client, token, generation)) {
            self.counters.batches_skipped.add(1);
            request.answer(out, message::Returned {}.into());
        } else {
            request.refuse(out, Refusal::Token { token, generation });
        }
    }
}
