//! The simulated processes with their sessions.

use std::collections::BTreeMap;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::message::Role;
use pushpull_worker::simulation as worker;

use super::{ScheduledEvent, SimProcess, SimWorld};
use crate::chance::SimChance;
use crate::network::{Direction, Item, LinkClient, LinkServer};
use crate::process_program::ProcessProgram;

impl<P: ProcessProgram> SimProcess<P> {
    /// Names the process. The name does not depend on other processes.
    pub(crate) fn name(&self) -> String {
        format!("process {} of {}", self.life, self.program.task_name())
    }
}

impl<P: ProcessProgram> SimWorld<P> {
    /// Returns the number of the next process of a task among those of the task, from 1, and its
    /// random choices.
    pub(crate) fn next_life(&self, task_name: &str) -> (u64, SimChance) {
        let of_task = self.processes.iter().filter(|other| other.program.task_name() == task_name);
        let life = 1 + of_task.count() as u64;
        (life, SimChance::of(self.setting.seed, &format!("process {life} of {task_name}")))
    }

    /// Creates the session of a process.
    pub(crate) fn session(
        &self,
        task: TaskId,
        role: Role,
        incarnation: u64,
    ) -> worker::SessionEndpoint {
        let cluster = &self.setting.cluster;
        let catalogue = self.setting.catalogue.clone();
        let part_bytes = self.setting.part_bytes;
        let features = self.setting.features_of(&task.to_string());
        let mut endpoint = worker::SessionEndpoint::new(
            cluster,
            task,
            role,
            incarnation,
            catalogue,
            part_bytes,
            features,
        );
        if let Some(tokens) = self.setting.tokens() {
            endpoint = endpoint.with_tokens(tokens.of_process(incarnation));
        }
        #[cfg(feature = "planted")]
        if self.setting.planted.bug() == Some(pushpull_ps::planted::Bug::SlotReusedEarly) {
            endpoint.overwrite_push_slots();
        }
        #[cfg(feature = "planted")]
        if self.setting.planted.bug() == Some(pushpull_ps::planted::Bug::OwnerNotAsked) {
            endpoint.skip_owner();
        }
        endpoint
    }

    /// Adds a process, and returns its number.
    pub(crate) fn add_process(
        &mut self,
        endpoint: worker::SessionEndpoint,
        program: P,
        life: u64,
        chance: SimChance,
    ) -> usize {
        self.processes.push(SimProcess {
            endpoint,
            program,
            links: BTreeMap::new(),
            armed: None,
            paused_until: None,
            is_alive: true,
            life,
            chance,
        });
        self.processes.len() - 1
    }

    pub(crate) fn with_process(
        &mut self,
        process: usize,
        act: impl FnOnce(&mut worker::SessionEndpoint),
    ) {
        if self.processes[process].is_alive {
            act(&mut self.processes[process].endpoint);
            self.settle_process(process);
        }
    }

    /// Carries out a session's outputs until there are none, then schedules its timer.
    pub(crate) fn settle_process(&mut self, number: usize) {
        while let Some(event) = self.processes[number].endpoint.poll() {
            match event {
                worker::EndpointEvent::Connect { link, shard } => {
                    let client = LinkClient::Worker { process: number, link };
                    let connection = self.open(client, LinkServer::Shard(shard));
                    self.processes[number].links.insert(link, connection);
                }
                worker::EndpointEvent::Disconnect { link } => {
                    if let Some(connection) = self.processes[number].links.remove(&link) {
                        self.drop_connection(connection);
                    }
                }
                worker::EndpointEvent::Send { link, frame } => {
                    if let Some(&connection) = self.processes[number].links.get(&link) {
                        self.send(connection, Direction::ToServer, Item::Bytes(frame.into()));
                    }
                }
                worker::EndpointEvent::ContinueRead => {
                    let chance = &mut self.processes[number].chance;
                    let pause = match chance.between(0, 99) {
                        // Descheduled, sometimes for longer than the stall timeout.
                        0 | 1 => chance.millis(100, 1500),
                        2..=9 => chance.millis(5, 100),
                        _ => chance.micros(1, 2000),
                    };
                    self.after(pause, ScheduledEvent::Read(number));
                }
                worker::EndpointEvent::Reply { op, reply } => {
                    self.trace.note(|| format!("  process {number} is answered {}", short(&reply)));
                    P::replied(self, number, op, reply);
                    if !self.processes[number].is_alive {
                        return;
                    }
                }
            }
        }
        if self.processes[number].program.waits().is_none() {
            return self.end_process(number);
        }
        self.arm(number);
    }

    /// Schedules the timer of a process, unless it is due earlier already.
    pub(crate) fn arm(&mut self, number: usize) {
        let now = self.now;
        let process = &mut self.processes[number];
        let session = process.endpoint.wake_at(now);
        let wake = process.program.wake_at().map_or(session, |program| program.min(session));
        let wake = wake.max(now + Duration::from_micros(1));
        if process.armed.is_none_or(|(armed, _)| wake < armed) {
            if let Some(later) = process.armed {
                self.queue.remove(&later);
            }
            let key = self.at(wake, ScheduledEvent::Wake(number));
            self.processes[number].armed = Some(key);
        }
    }

    /// Ends a process, which has finished or is killed.
    pub(crate) fn end_process(&mut self, number: usize) {
        let process = &mut self.processes[number];
        process.is_alive = false;
        let links: Vec<u64> = std::mem::take(&mut process.links).into_values().collect();
        let serves = process.program.serves();
        for connection in links {
            self.drop_connection(connection);
        }
        // Messages between processes that a process has sent may arrive after its end.
        let is_of = |client: LinkClient, server: LinkServer| match client {
            LinkClient::Caller { process, .. } => {
                process == number || serves.map(LinkServer::Functions) == Some(server)
            }
            LinkClient::Worker { .. } | LinkClient::Shard(_) => false,
        };
        let of_it = self.connections.iter().filter(|(_, of)| is_of(of.client, of.server));
        for connection in of_it.map(|(&connection, _)| connection).collect::<Vec<_>>() {
            self.cut(connection);
        }
        P::ended(self, number);
    }
}

fn short(reply: &Result<worker::WorkerAnswer, pushpull_worker::Error>) -> String {
    match reply {
        Ok(worker::WorkerAnswer::Pulled(_, step)) => format!("values of step {step}"),
        Ok(answer) => format!("{answer:?}"),
        Err(error) => Chain(error).to_string(),
    }
}
