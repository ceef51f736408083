// Recurrent networks, composed as PyTorch composes them on the CPU.
//
// On any other device PyTorch asks for fused cells, adds the biases elsewhere and multiplies the
// input step by step. The results would differ from the CPU's in the last bits, and those of the
// gradients too. So the whole operators are written again, after ATen/native/RNN.cpp.
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_common.h"

namespace emu {
namespace {

using at::Tensor;
using at::TensorList;

struct Weights {
  Tensor input, hidden, input_bias, hidden_bias, projection;

  Tensor from_input(const Tensor& x) const { return at::linear(x, input, input_bias); }
  Tensor from_hidden(const Tensor& h) const { return at::linear(h, hidden, hidden_bias); }
  Tensor project(const Tensor& h) const {
    return projection.defined() ? at::matmul(h, projection.t()) : h;
  }
};

std::vector<Weights> gather(TensorList flat, bool has_biases, bool has_projections) {
  size_t per_cell = 2 + (has_biases ? 2 : 0) + (has_projections ? 1 : 0);
  TORCH_CHECK(flat.size() % per_cell == 0, "got an incorrect number of RNN parameters");
  std::vector<Weights> weights;
  for (size_t i = 0; i < flat.size(); i += per_cell) {
    Weights cell{flat[i], flat[i + 1], {}, {}, {}};
    if (has_biases) cell.input_bias = flat[i + 2], cell.hidden_bias = flat[i + 3];
    if (has_projections) cell.projection = flat[i + per_cell - 1];
    weights.push_back(cell);
  }
  return weights;
}

// ---- cells: one step. A state is a list: hidden, and for LSTM also the cell's memory.

using State = std::vector<Tensor>;

State map_state(const State& state, const std::function<Tensor(const Tensor&)>& map) {
  State mapped;
  for (const Tensor& part : state) mapped.push_back(map(part));
  return mapped;
}

// `gates` are those of the input, already multiplied and with their bias.
State lstm_step(const Tensor& gates, const State& state, const Weights& weights) {
  auto chunks = weights.from_hidden(state[0]).add_(gates).unsafe_chunk(4, 1);
  Tensor in = chunks[0].sigmoid_(), forget = chunks[1].sigmoid_();
  Tensor cell = chunks[2].tanh_(), out = chunks[3].sigmoid_();
  Tensor memory = (forget * state[1]).add_(in * cell);
  return {weights.project(out * memory.tanh()), memory};
}

State gru_step(const Tensor& gates, const State& state, const Weights& weights) {
  auto from_input = gates.unsafe_chunk(3, 1);
  auto from_hidden = weights.from_hidden(state[0]).unsafe_chunk(3, 1);
  Tensor reset = from_hidden[0].add_(from_input[0]).sigmoid_();
  Tensor update = from_hidden[1].add_(from_input[1]).sigmoid_();
  Tensor fresh = from_input[2].add(from_hidden[2].mul_(reset)).tanh_();
  return {(state[0] - fresh).mul_(update).add_(fresh)};
}

State tanh_step(const Tensor& gates, const State& state, const Weights& weights) {
  return {at::tanh(weights.from_hidden(state[0]).add_(gates))};
}

State relu_step(const Tensor& gates, const State& state, const Weights& weights) {
  return {at::relu(weights.from_hidden(state[0]).add_(gates))};
}

using Step = State (*)(const Tensor&, const State&, const Weights&);

// ---- one direction of one layer

struct Sequence {
  Tensor data;         // (steps, rows, features), or packed: (rows of all steps, features)
  Tensor batch_sizes;  // packed only: rows of each step, on the CPU
};

std::pair<Tensor, State> run_padded(Step step, const Tensor& input, State state,
                                    const Weights& weights, bool reverse) {
  std::vector<Tensor> steps = weights.from_input(input).unbind(0), outputs;
  TORCH_CHECK(!steps.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (reverse) std::reverse(steps.begin(), steps.end());
  for (const Tensor& gates : steps) {
    state = step(gates, state, weights);
    outputs.push_back(state[0]);
  }
  if (reverse) std::reverse(outputs.begin(), outputs.end());
  return {at::stack(outputs, 0), state};
}

// The rows are sorted by length: from step to step, the last ones come to their end.
std::pair<Tensor, State> run_packed(Step step, const Sequence& input, State state,
                                    const Weights& weights) {
  Tensor gates = weights.from_input(input.data);
  const auto* sizes = input.batch_sizes.const_data_ptr<int64_t>();
  int64_t offset = 0, rows = sizes[0];
  std::vector<Tensor> outputs;
  std::vector<State> finished;
  for (int64_t i = 0; i < input.batch_sizes.numel(); i++) {
    if (int64_t ended = rows - sizes[i]; ended > 0) {
      finished.push_back(
          map_state(state, [&](const Tensor& t) { return t.narrow(0, rows - ended, ended); }));
      state = map_state(state, [&](const Tensor& t) { return t.narrow(0, 0, rows - ended); });
    }
    rows = sizes[i];
    state = step(gates.narrow(0, offset, rows), state, weights);
    outputs.push_back(state[0]);
    offset += rows;
  }
  finished.push_back(state);
  std::reverse(finished.begin(), finished.end());
  State last;
  for (size_t part = 0; part < state.size(); part++) {
    std::vector<Tensor> pieces;
    for (const State& piece : finished) pieces.push_back(piece[part]);
    last.push_back(at::cat(pieces, 0));
  }
  return {at::cat(outputs, 0), last};
}

std::pair<Tensor, State> run_packed_reversed(Step step, const Sequence& input, const State& first,
                                             const Weights& weights) {
  Tensor gates = weights.from_input(input.data);
  const auto* sizes = input.batch_sizes.const_data_ptr<int64_t>();
  int64_t steps = input.batch_sizes.numel(), offset = gates.size(0), rows = sizes[steps - 1];
  State state = map_state(first, [&](const Tensor& t) { return t.narrow(0, 0, rows); });
  std::vector<Tensor> outputs;
  for (int64_t i = steps - 1; i >= 0; i--) {
    if (int64_t begun = sizes[i] - rows; begun > 0)
      for (size_t part = 0; part < state.size(); part++)
        state[part] = at::cat({state[part], first[part].narrow(0, rows, begun)}, 0);
    rows = sizes[i];
    offset -= rows;
    state = step(gates.narrow(0, offset, rows), state, weights);
    outputs.push_back(state[0]);
  }
  std::reverse(outputs.begin(), outputs.end());
  return {at::cat(outputs, 0), state};
}

// ---- layers and directions

struct Network {
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional;
};

// oneDNN runs one direction of one layer as one operator, on the CPU and so here too.
std::pair<Tensor, State> run_fused_lstm(const Network& network, const Tensor& input,
                                        const State& state, const Weights& weights, bool reverse) {
  constexpr int64_t kModeLstm = 2;
  Tensor no_bias = at::zeros({weights.input.size(0)}, weights.input.options());
  auto [output, hidden, memory, workspace] = at::mkldnn_rnn_layer(
      input, weights.input, weights.hidden, network.has_biases ? weights.input_bias : no_bias,
      network.has_biases ? weights.hidden_bias : no_bias, state[0], state[1], reverse,
      /*batch_sizes=*/{}, kModeLstm, /*hidden_size=*/state[0].size(-1), network.layers,
      network.has_biases, network.bidirectional, /*batch_first=*/false, network.train);
  return {output, {hidden, memory}};
}

// `initial` holds, for each part of a state, (layers * directions, rows, features).
std::pair<Tensor, State> run_network(const Network& network, Step step, const Sequence& input,
                                     const State& initial, const std::vector<Weights>& weights) {
  size_t directions = network.bidirectional ? 2 : 1;
  bool packed = input.batch_sizes.defined();
  bool fused = step == &lstm_step && !packed && input.data.scalar_type() == at::kFloat &&
               input.data.numel() && !weights[0].projection.defined() &&
               at::globalContext().userEnabledMkldnn();
  Sequence layer_input{fused ? input.data.contiguous() : input.data, input.batch_sizes};
  std::vector<std::vector<Tensor>> last(initial.size());
  for (size_t layer = 0; layer < size_t(network.layers); layer++) {
    std::vector<Tensor> outputs;
    for (size_t direction = 0; direction < directions; direction++) {
      size_t index = layer * directions + direction;
      State state =
          map_state(initial, [&](const Tensor& part) { return part.select(0, int64_t(index)); });
      if (fused) state = map_state(state, [](const Tensor& part) { return part.contiguous(); });
      const Weights& own = weights[index];
      bool reverse = direction == 1;
      auto [output, final_state] =
          fused    ? run_fused_lstm(network, layer_input.data, state, own, reverse)
          : !packed ? run_padded(step, layer_input.data, state, own, reverse)
          : reverse ? run_packed_reversed(step, layer_input, state, own)
                    : run_packed(step, layer_input, state, own);
      outputs.push_back(output);
      for (size_t part = 0; part < last.size(); part++) last[part].push_back(final_state[part]);
    }
    layer_input.data = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (network.dropout != 0 && network.train && layer + 1 < size_t(network.layers))
      layer_input.data = at::dropout(layer_input.data, network.dropout, true);
  }
  State final_states;
  for (const auto& parts : last) final_states.push_back(at::stack(parts, 0));
  return {layer_input.data, final_states};
}

std::pair<Tensor, State> run_batch(const Network& network, Step step, const Tensor& input,
                                   const State& initial, TensorList flat, bool batch_first) {
  bool projects = initial.size() == 2 && initial[0].size(2) != initial[1].size(2);
  Sequence steps_first{batch_first ? input.transpose(0, 1) : input, {}};
  auto [output, last] = run_network(network, step, steps_first, initial,
                                    gather(flat, network.has_biases, projects));
  return {batch_first ? output.transpose(0, 1) : output, last};
}

std::pair<Tensor, State> run_packed_batch(const Network& network, Step step, const Tensor& data,
                                          const Tensor& batch_sizes, const State& initial,
                                          TensorList flat) {
  bool projects = initial.size() == 2 && initial[0].size(2) != initial[1].size(2);
  return run_network(network, step, {data, batch_sizes}, initial,
                     gather(flat, network.has_biases, projects));
}

// ---- the operators

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, TensorList state, TensorList flat,
                                        bool has_biases, int64_t layers, double dropout, bool train,
                                        bool bidirectional, bool batch_first) {
  auto [output, last] = run_batch({has_biases, layers, dropout, train, bidirectional}, &lstm_step,
                                  input, state.vec(), flat, batch_first);
  return {output, last[0], last[1]};
}

std::tuple<Tensor, Tensor, Tensor> lstm_packed(const Tensor& data, const Tensor& batch_sizes,
                                               TensorList state, TensorList flat, bool has_biases,
                                               int64_t layers, double dropout, bool train,
                                               bool bidirectional) {
  auto [output, last] = run_packed_batch({has_biases, layers, dropout, train, bidirectional},
                                         &lstm_step, data, batch_sizes, state.vec(), flat);
  return {output, last[0], last[1]};
}

template <Step step>
std::tuple<Tensor, Tensor> recurrent(const Tensor& input, const Tensor& state, TensorList flat,
                                     bool has_biases, int64_t layers, double dropout, bool train,
                                     bool bidirectional, bool batch_first) {
  auto [output, last] = run_batch({has_biases, layers, dropout, train, bidirectional}, step, input,
                                  {state}, flat, batch_first);
  return {output, last[0]};
}

template <Step step>
std::tuple<Tensor, Tensor> recurrent_packed(const Tensor& data, const Tensor& batch_sizes,
                                            const Tensor& state, TensorList flat, bool has_biases,
                                            int64_t layers, double dropout, bool train,
                                            bool bidirectional) {
  auto [output, last] = run_packed_batch({has_biases, layers, dropout, train, bidirectional}, step,
                                         data, batch_sizes, {state}, flat);
  return {output, last[0]};
}

using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, TensorList state, const Tensor& w_input,
                                     const Tensor& w_hidden, const OptionalTensor& input_bias,
                                     const OptionalTensor& hidden_bias) {
  Weights weights{w_input, w_hidden, input_bias.value_or(Tensor()), hidden_bias.value_or(Tensor()),
                  {}};
  State next = lstm_step(weights.from_input(input), state.vec(), weights);
  return {next[0], next[1]};
}

Tensor gru_cell(const Tensor& input, const Tensor& state, const Tensor& w_input,
                const Tensor& w_hidden, const OptionalTensor& input_bias,
                const OptionalTensor& hidden_bias) {
  Weights weights{w_input, w_hidden, input_bias.value_or(Tensor()), hidden_bias.value_or(Tensor()),
                  {}};
  return gru_step(weights.from_input(input), {state}, weights)[0];
}

void register_all(torch::Library& m) {
  m.impl("lstm.input", lstm);
  m.impl("lstm.data", lstm_packed);
  m.impl("gru.input", recurrent<&gru_step>);
  m.impl("gru.data", recurrent_packed<&gru_step>);
  m.impl("rnn_tanh.input", recurrent<&tanh_step>);
  m.impl("rnn_tanh.data", recurrent_packed<&tanh_step>);
  m.impl("rnn_relu.input", recurrent<&relu_step>);
  m.impl("rnn_relu.data", recurrent_packed<&relu_step>);
  m.impl("lstm_cell", lstm_cell);
  m.impl("gru_cell", gru_cell);
}

// At autograd's key, so that the gradients are those of the operators that these are made of; and
// below it for inference mode, which skips that key.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_all(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_all(m); }

}  // namespace
}  // namespace emu
